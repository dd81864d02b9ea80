"""A table of the paper as rows of text, from which every format is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cofima.report.footnotes import HERE, PAPER, letter, notes
from cofima.report.layouts import BACKBONES, DATASETS, Line
from cofima.report.paper import Column, Entry, PaperTable
from cofima.report.published import Disagreement, Place, Record, published
from cofima.report.table import MISSING


@dataclass(frozen=True)
class Cell:
    """One number with its spread, and the marks of footnotes."""

    text: str
    bold: bool = False
    marks: str = ""


@dataclass(frozen=True)
class PrintedRow:
    """One row: what stands before the numbers, whose numbers they are, and the numbers."""

    heads: list[Cell]
    whose: str
    cells: list[Cell]
    rule: bool = False  # a line is drawn above it


@dataclass(frozen=True)
class Printed:
    """A whole table."""

    title: str
    heads: list[str]
    groups: list[tuple[Cell, list[str]]]  # a dataset and its metrics
    rows: list[PrintedRow]
    notes: list[str]


def printed(table: PaperTable) -> Printed:
    """Lay out a table: for each line of the paper our runs, where there are any, and what is published."""
    said = [d for d in published().disagreements if table.layout.key in d.tables]
    mine, theirs = _values(table), _published(table)
    rows: list[PrintedRow] = []
    lines = list(table.layout.lines)
    lines += [line for line in dict.fromkeys(e.line for e in table.entries) if line not in lines]
    block = lines[0].block
    for line in lines:
        entries = [entry for entry in table.entries if entry.line == line]
        for place, entry in enumerate(entries):
            cells = [_ours(entry, column, mine) for column in table.columns]
            rule = not place and line.block != block
            rows.append(PrintedRow(_heads(table, line, entry, ""), HERE, cells, rule))
        if line in table.layout.lines:
            cells = [_theirs(line, column, theirs, said) for column in table.columns]
            heads = _heads(table, line, None, _marks(said, line, None))
            rule = not entries and line.block != block
            rows.append(PrintedRow(heads, PAPER, cells, rule))
        block = line.block
    groups = [
        (Cell(DATASETS[d], marks=_marks(said, None, (d, ""))), list(table.layout.metrics))
        for d in table.layout.datasets
    ]
    source = published().sources[table.layout.key]
    title = f"{source[0].upper()}{source[1:]} of the paper: {table.layout.title}"
    return Printed(title, [*table.layout.heads, "Numbers"], groups, rows, notes(table, said))


def _heads(table: PaperTable, line: Line, entry: Entry | None, marks: str) -> list[Cell]:
    """Return the cells before the numbers."""
    texts = {
        "Method": entry.label if entry else line.name,
        "Memory-Free": MISSING if line.memory_free is None else "✓" if line.memory_free else "✗",
        "Init": line.init or MISSING,
        "λ": (entry.lam if entry else "") or line.lam or MISSING,
        "Backbone": BACKBONES[line.backbone],
    }
    return [Cell(texts[head], marks=marks if head == "Method" else "") for head in table.layout.heads]


def record(line: Line, column: Column, key: str) -> Record | None:
    """Return what the paper prints in a cell."""
    dataset, metric = column
    wanted = (key, line.name, BACKBONES[line.backbone], DATASETS[dataset], metric, line.init)
    for r in published().records:
        if (r.table, r.method, r.backbone, r.dataset, r.metric, r.init) == wanted:
            return r
    return None


def _values(table: PaperTable) -> dict[Column, float]:
    """Return our best mean of each column, the bound left out."""
    best = {}
    for column in table.columns if table.layout.ranked else ():
        means = [s.mean for e in table.entries if e.line.method != "joint" and (s := e.summary(column))]
        if len(means) > 1:
            best[column] = round(max(means), 2)
    return best


def _published(table: PaperTable) -> dict[Column, tuple[float, dict[Line, Record]]]:
    """Return the published numbers of each column, and the best of them, the bound left out."""
    found = {}
    for column in table.columns:
        records = {line: r for line in table.layout.lines if (r := record(line, column, table.layout.key))}
        means = [r.mean for line, r in records.items() if line.method != "joint" and table.layout.ranked]
        best = max(means, default=101.0)  # none is, where rows have different backbones
        found[column] = (best, records)
    return found


def _ours(entry: Entry, column: Column, best: Mapping[Column, float]) -> Cell:
    value = entry.summary(column)
    if value is None:
        return Cell(MISSING)
    spread = "" if value.std is None else f" ± {value.std:.2f}"
    bold = entry.line.method != "joint" and round(value.mean, 2) == best.get(column)
    return Cell(f"{value.mean:.2f}{spread} ({value.n})", bold)


def _theirs(
    line: Line,
    column: Column,
    values: Mapping[Column, tuple[float, dict[Line, Record]]],
    said: Sequence[Disagreement],
) -> Cell:
    best, records = values[column]
    found = records.get(line)
    if found is None:
        return Cell(MISSING)
    bold = line.method != "joint" and found.mean == best
    return Cell(f"{found.mean:.2f} ± {found.std:.2f}", bold, _marks(said, line, column))


def _marks(said: Sequence[Disagreement], line: Line | None, column: Column | None) -> str:
    """Return the letters of the footnotes of a cell; of a row or a column where the other is left out."""
    return ",".join(
        letter(number)
        for number, each in enumerate(said)
        if any(_meant(place, line, column) for place in each.cells)
    )


def _meant(place: Place, line: Line | None, column: Column | None) -> bool:
    dataset, metric = (DATASETS[column[0]], column[1] or None) if column else (None, None)
    if (place.method, place.dataset, place.metric) != (line.name if line else None, dataset, metric):
        return False
    if line is None:
        return True
    return place.init in (None, line.init) and place.backbone in (None, BACKBONES[line.backbone])
