"""The paper's tables with our runs: per line our numbers, then the published ones, never mixed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from cofima.report import significance
from cofima.report.comparison import number_cell
from cofima.report.paper.layouts import BACKBONES, DATASETS, LAYOUTS, Line
from cofima.report.paper.protocol import ColumnKey, FilledTable, TableEntry
from cofima.report.paper.published import CellPattern, Disagreement, PublishedNumber, published
from cofima.report.table import MISSING, Cell, Column, Row, Table

HERE, PAPER = "here", "paper"


def table(filled: FilledTable) -> Table:
    """Return a table with our runs, if any, and the published numbers for each line of the paper."""
    layout = filled.layout
    said = [d for d in published().disagreements if layout.key in d.tables]
    source = published().sources[layout.key]
    columns = [Column(head, "left") for head in (*layout.heads, "Numbers")]
    columns += [
        Column(metric, over=DATASETS[dataset], marks=_marks(said, None, (dataset, "")))
        for dataset, metric in filled.columns
    ]
    return Table(
        f"{source[0].upper()}{source[1:]} of the paper: {layout.title}",
        columns,
        _rows(filled, said),
        footnotes=_footnotes(filled, said),
        records=list(_records(filled)),
        scaled=True,
        style="paper",
    )


def tests(filled: FilledTable, reference: str) -> Table:
    """Test our rows of a table against one of them, without the upper bound."""
    entries = [entry for entry in filled.entries if not entry.line.bound]
    names = {column: f"{DATASETS[column[0]]} {column[1]}" for column in filled.columns}
    rows = {e.label: {names[column]: e.values(column) for column in filled.columns} for e in entries}
    known = {entry.label: entry.line.method for entry in entries}
    return significance.table_of_tests(f"table {filled.layout.key}", rows, known, reference)


def _lines(filled: FilledTable) -> list[Line]:
    """Return the lines of the paper, then those of other methods."""
    return list(dict.fromkeys([*filled.layout.lines, *(entry.line for entry in filled.entries)]))


def _rows(filled: FilledTable, said: Sequence[Disagreement]) -> list[Row]:
    mine, theirs = _best(filled), _published(filled)
    rows: list[Row] = []
    lines = _lines(filled)
    block = lines[0].block
    for line in lines:
        first = len(rows)
        for entry in (entry for entry in filled.entries if entry.line == line):
            numbers = [_ours(entry, column, mine) for column in filled.columns]
            rows.append(Row([*_heads(filled, line, entry), Cell(HERE), *numbers]))
        if line in filled.layout.lines:
            numbers = [_theirs(line, column, theirs, said) for column in filled.columns]
            heads = _heads(filled, line, None, _marks(said, line, None))
            rows.append(Row([*heads, Cell(PAPER), *numbers], quoted=True))
        rows[first] = replace(rows[first], rule=line.block != block)
        block = line.block
    return rows


def _records(filled: FilledTable) -> Iterator[dict[str, object]]:
    """Yield one record per cell, with our unrounded numbers and those of the paper."""
    key = filled.layout.key
    for line in _lines(filled):
        mine: list[TableEntry | None] = [entry for entry in filled.entries if entry.line == line]
        for entry in mine or [None]:
            for column in filled.columns:
                known, value = record(line, column, key), entry and entry.summary(column)
                if known is None and value is None:
                    continue
                yield {
                    "table": key,
                    "method": line.method,
                    "label": entry.label if entry else line.name,
                    "memory_free": "" if line.memory_free is None else str(line.memory_free).lower(),
                    "backbone": BACKBONES[line.backbone],
                    "init": line.init,
                    "lambda": (entry.lam if entry else "") or line.lam,
                    "dataset": DATASETS[column[0]],
                    "metric": column[1],
                    "mean": value.mean if value else "",
                    "std": value.std if value else "",
                    "n": value.n if value else "",
                    "seeds": " ".join(map(str, entry.values(column))) if entry else "",
                    "published_mean": known.mean if known else "",
                    "published_std": known.std if known else "",
                    "published_source": f"{published().paper}, {published().sources[key]}" if known else "",
                }


def _heads(filled: FilledTable, line: Line, entry: TableEntry | None, marks: str = "") -> list[Cell]:
    """Return the cells before the numbers."""
    texts = {
        "Method": entry.label if entry else line.name,
        "Memory-Free": MISSING if line.memory_free is None else "✓" if line.memory_free else "✗",
        "Init": line.init or MISSING,
        "λ": (entry.lam if entry else "") or line.lam or MISSING,
        "Backbone": BACKBONES[line.backbone],
    }
    return [Cell(texts[head], marks=marks if head == "Method" else "") for head in filled.layout.heads]


def record(line: Line, column: ColumnKey, key: str) -> PublishedNumber | None:
    """Return the published number of a cell."""
    dataset, metric = column
    wanted = (key, line.name, BACKBONES[line.backbone], DATASETS[dataset], metric, line.init)
    for r in published().records:
        if (r.table, r.method, r.backbone, r.dataset, r.metric, r.init) == wanted:
            return r
    return None


def _best(filled: FilledTable) -> dict[ColumnKey, float]:
    """Return our best mean of each column, without the upper bound."""
    best = {}
    for column in filled.columns if filled.layout.ranked else ():
        means = [s.mean for e in filled.entries if not e.line.bound and (s := e.summary(column))]
        if len(means) > 1:
            best[column] = round(max(means), 2)
    return best


def _published(filled: FilledTable) -> dict[ColumnKey, tuple[float, dict[Line, PublishedNumber]]]:
    """Return the published numbers of each column and their best, without the upper bound."""
    found = {}
    for column in filled.columns:
        records = {line: r for line in filled.layout.lines if (r := record(line, column, filled.layout.key))}
        means = [r.mean for line, r in records.items() if not line.bound and filled.layout.ranked]
        best = max(means, default=101.0)  # matches none: rows with different backbones are not ranked
        found[column] = (best, records)
    return found


def _ours(entry: TableEntry, column: ColumnKey, best: Mapping[ColumnKey, float]) -> Cell:
    value = entry.summary(column)
    if value is None:
        return Cell(MISSING)
    bold = not entry.line.bound and round(value.mean, 2) == best.get(column)
    return replace(number_cell(value), count=str(value.n), best=bold)


def _theirs(
    line: Line,
    column: ColumnKey,
    values: Mapping[ColumnKey, tuple[float, dict[Line, PublishedNumber]]],
    said: Sequence[Disagreement],
) -> Cell:
    best, records = values[column]
    found = records.get(line)
    if found is None:
        return Cell(MISSING)
    bold = not line.bound and found.mean == best
    return Cell(f"{found.mean:.2f}", f"{found.std:.2f}", best=bold, marks=_marks(said, line, column))


def _marks(said: Sequence[Disagreement], line: Line | None, column: ColumnKey | None) -> str:
    """Return the footnote letters of a cell, or of a row or column if the other is None."""
    return ",".join(
        _letter(number)
        for number, each in enumerate(said)
        if any(_meant(place, line, column) for place in each.cells)
    )


def _meant(place: CellPattern, line: Line | None, column: ColumnKey | None) -> bool:
    dataset, metric = (DATASETS[column[0]], column[1] or None) if column else (None, None)
    if (place.method, place.dataset, place.metric) != (line.name if line else None, dataset, metric):
        return False
    if line is None:
        return True
    return place.init in (None, line.init) and place.backbone in (None, BACKBONES[line.backbone])


def _letter(number: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[number]


def _footnotes(filled: FilledTable, said: Sequence[Disagreement]) -> list[str]:
    """Return the footnotes: sources of the numbers, contradictions, and runs set apart with the reasons."""
    found = [
        f"{HERE}: mean ± standard deviation (n − 1) over seeds, in brackets their number; accuracies in %. "
        f"{PAPER}: {published().paper}, {published().sources[filled.layout.key]}. Bold: the best of the "
        "column in each, by its value, without joint training."
    ]
    found = found if filled.layout.ranked else [found[0].partition(" Bold:")[0]]
    found += [_facts(filled)] if filled.entries else ["No run here follows the protocol of this table."]
    found += [f"{_letter(number)}: {_said(each)}" for number, each in enumerate(said)]
    if filled.repeats:
        found.append(f"{filled.repeats} more with a config and seed already in the table: not counted again.")
    if filled.elsewhere:
        others = ", ".join(key for key in LAYOUTS if key != filled.layout.key)
        found.append(f"{filled.elsewhere} of methods without a line in this table are left out ({others}).")
    found += [
        f"Apart: {run.label}, seed {run.seed}, {run.folder}: {'; '.join(why)}." for run, why in filled.apart
    ]
    return found


def _said(each: Disagreement) -> str:
    numbers = []
    for place in each.cells:
        if place.value is not None:
            spread = "" if place.std is None else f" ± {place.std:.2f}"
            numbers.append(f"{place.method} {place.dataset} {place.metric} {place.value:.2f}{spread}")
    return f"{each.text}{': ' if numbers else ''}{'; '.join(numbers)} ({each.source})."


def _facts(filled: FilledTable) -> str:
    """Return the splits and weights behind our numbers."""
    parts = []
    for dataset in filled.layout.datasets:
        runs = [run for entry in filled.entries for run in entry.runs.get(dataset, [])]
        if runs:
            data, weights = runs[0].record.data, dict.fromkeys(r.record.backbone.get("sha256") for r in runs)
            split = f"{data.get('split_id', 'unknown')} {str(data.get('split_hash', ''))[:12]}".strip()
            hashes = ", ".join(str(sha)[:12] for sha in weights)
            parts.append(f"{DATASETS[dataset]}: split {split}, backbone sha256 {hashes}")
    return f"{HERE} rests on {'; '.join(parts)}."
