"""Comparisons of runs: tables of mean and standard deviation over seeds, of comparable runs only."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cofima.report import metrics
from cofima.report.groups import Group, comparable, differences, grouped
from cofima.report.metrics import Summary
from cofima.report.runs import Run
from cofima.report.table import MISSING, Cell, Column, Row, Table

# facts about the backbone in every CSV record, besides its name and sha256
_BACKBONE = ("alias", "pretraining", "overlap", "layout", "final_norm")


@dataclass(frozen=True)
class Measure:
    """One column of a table.

    Attributes:
        key: Name in CSV files.
        title: Title of the column.
        better: 1 if larger is better, -1 if smaller is, 0 for neither.
        of: Returns the value of a run.
        meaning: Explanation.
        percent: True for accuracies.
    """

    key: str
    title: str
    better: int
    of: Callable[[Run], float | None]
    meaning: str
    percent: bool = False


def _over_time(measure: Callable[[Run], float | None]) -> Callable[[Run], float | None]:
    """Return the measure without a value for runs that learn all classes at once or have no finished task."""
    return lambda run: None if run.all_at_once or not run.history else measure(run)


MEASURES = (
    Measure(
        "last_acc",
        "Last-Acc",
        +1,
        lambda run: metrics.last(run.matrix, run.sizes) if run.history else None,
        "Accuracy on the test images of all classes after the last task.",
        percent=True,
    ),
    Measure(
        "inc_acc",
        "Inc-Acc",
        +1,
        _over_time(lambda run: metrics.incremental(run.matrix, run.sizes)),
        "Accuracy on all classes seen so far, averaged over the moments after each task.",
        percent=True,
    ),
    Measure(
        "forgetting",
        "Forgetting",
        -1,
        _over_time(lambda run: metrics.forgetting(run.matrix)),
        "How many points earlier tasks fell, on average, from their best earlier accuracy; lower is better.",
        percent=True,
    ),
    Measure(
        "distance",
        "Distance",
        0,
        lambda run: run.distances[-1] if run.history else None,
        "Euclidean distance of the backbone's weights from the pre-trained ones at the end.",
    ),
    Measure(
        "seconds",
        "Seconds",
        -1,
        lambda run: sum(run.seconds) if run.history else None,
        "Time for all tasks: training, Fisher information, alignment and evaluation.",
    ),
)


@dataclass(frozen=True)
class Comparison:
    """Comparable runs: groups in the order of the rows, and the table."""

    groups: list[Group]
    table: Table


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Return one table per set of comparable runs; notes explain why a set differs from the first."""
    sets = comparable(runs)
    return [_comparison(number, members, sets) for number, members in enumerate(sets, start=1)]


def _comparison(number: int, members: list[Run], sets: list[list[Run]]) -> Comparison:
    pairs = [(group, [_summary(group, measure) for measure in MEASURES]) for group in grouped(members)]
    pairs.sort(key=lambda pair: _rank(*pair))
    groups, values = [group for group, _ in pairs], [found for _, found in pairs]
    title = (f"Table {number}: " if len(sets) > 1 else "") + _title(members[0])
    columns = [_cells(m, groups, [v[place] for v in values]) for place, m in enumerate(MEASURES)]
    rows = [
        Row(
            [Cell(group.label), Cell(str(len(group.runs))), *(column[place] for column in columns)],
            rule=place > 0 and _section(group) != _section(groups[place - 1]),
        )
        for place, group in enumerate(groups)
    ]
    table = Table(
        title,
        [Column("Method", "left"), Column("n"), *(Column(m.title, number=True) for m in MEASURES)],
        rows,
        " ".join(_notes(groups, number, sets)),
        records=[_record(number, title, *pair) for pair in pairs],
    )
    return Comparison(groups, table)


def _summary(group: Group, measure: Measure) -> Summary | None:
    values = [value for run in group.runs if (value := measure.of(run)) is not None]
    return metrics.summarize(values) if values else None


def _section(group: Group) -> tuple[bool, bool]:
    # unfinished runs come last, below a rule: a few tasks are easy, so they would rank among the best
    return not group.finished, group.all_at_once


def _rank(group: Group, values: list[Summary | None]) -> tuple[bool, bool, float, str]:
    # weakest first, so that the upper bound follows the best method
    return *_section(group), values[0].mean if values[0] else -1.0, group.label


def _cells(measure: Measure, groups: Sequence[Group], values: Sequence[Summary | None]) -> list[Cell]:
    """Return one column with the best finished methods marked; equal printed numbers tie."""
    cells = [number_cell(value, _decimals(measure, values)) for value in values]
    able = [
        g.finished and not g.all_at_once and c.text != MISSING for g, c in zip(groups, cells, strict=True)
    ]
    means = [float(cell.text) for cell, compared in zip(cells, able, strict=True) if compared]
    if not measure.better or len(set(means)) < 2:
        return cells
    top = max(means, key=lambda mean: mean * measure.better)
    return [
        replace(cell, best=compared and float(cell.text) == top)
        for cell, compared in zip(cells, able, strict=True)
    ]


def number_cell(value: Summary | None, decimals: int = 2) -> Cell:
    """Format mean and standard deviation; only the mean for a single seed, and a dash without a value."""
    if value is None:
        return Cell(MISSING)
    return Cell(f"{value.mean:.{decimals}f}", "" if value.std is None else f"{value.std:.{decimals}f}")


def _decimals(measure: Measure, values: Sequence[Summary | None]) -> int:
    """Return the number of decimals: two for accuracies, else for three digits of the smallest value."""
    if measure.percent:
        return 2
    smallest = min((value.mean for value in values if value and value.mean > 0), default=1.0)
    return min(max(2 - math.floor(math.log10(smallest)), 0), 6)


def _record(number: int, title: str, group: Group, values: Sequence[Summary | None]) -> dict[str, object]:
    """Return the CSV record of a row, with unrounded numbers."""
    run = group.runs[0]
    data, backbone = run.record.data, run.record.backbone
    facts: dict[str, object] = {
        "table": number,
        "title": title,
        "label": group.label,
        "method": run.method,
        "n": len(group.runs),
        "seeds": " ".join(str(each.seed) for each in group.runs),
        "tasks_done": len(run.history),
        "tasks_planned": run.planned,
        "dataset": run.dataset,
        "dataset_fingerprint": data.get("fingerprint"),
        "split_id": data.get("split_id"),
        "split_hash": data.get("split_hash"),
        "backbone": run.backbone,
        "backbone_sha256": backbone.get("sha256"),
    }
    facts |= {f"backbone_{key}": backbone.get(key, "") for key in _BACKBONE}
    for measure, value in zip(MEASURES, values, strict=True):
        facts[f"{measure.key}_mean"] = value.mean if value else ""
        facts[f"{measure.key}_std"] = value.std if value else ""
    return facts


def _title(run: Run) -> str:
    sizes = sorted({len(task) for task in run.tasks})
    classes = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    tasks = f"{run.planned} task{'s' if run.planned != 1 else ''}"
    return f"{run.dataset}, {run.backbone}, {tasks} of {classes} classes"


def _notes(groups: list[Group], number: int, sets: list[list[Run]]) -> list[str]:
    """Return the note: weights, data and seeds of the table, and its difference from the first table."""
    run = next((r for group in groups for r in group.runs if r.finished), groups[0].runs[0])
    fewest, most = (pick(len(group.runs) for group in groups) for pick in (min, max))
    parts = [
        f"Backbone {run.backbone} (sha256 {_hash(run.record.backbone.get('sha256'))}),",
        f"dataset {run.dataset} (fingerprint {_hash(run.record.data.get('fingerprint'))}{_split(run)}),",
        f"{sum(run.sizes)} {_tested(run)}{'' if run.finished else ' so far'}, accuracies in %;",
        f"n = {fewest if fewest == most else f'{fewest} to {most}'} seed{'s' if most > 1 else ''}"
        + (", mean ± standard deviation (n − 1)." if most > 1 else "."),
    ]
    if run.origin:
        parts.append(run.origin)
    repeats = sum(group.repeats for group in groups)
    if repeats:
        parts.append(f"{repeats} more with a config and seed already in the table: not counted again.")
    if number > 1:
        parts.append(f"Not comparable with table 1 ({'; '.join(_apart(sets[0], sets[number - 1]))}).")
    return parts


def _apart(first: list[Run], other: list[Run]) -> list[str]:
    return next(found for a in first for b in other if (found := differences(a, b)))


def _tested(run: Run) -> str:
    # accuracies that were used to choose settings must never be mistaken for test results
    held_out = run.config.get("val_fraction")
    return "training images held out, not the test images" if held_out else "test images"


def _split(run: Run) -> str:
    name, digest = (run.record.data.get(key) for key in ("split_id", "split_hash"))
    return f", split {name} {_hash(digest)}" if name and digest else ""


def _hash(value: object) -> str:
    return str(value)[:12] if value else "unknown"
