"""Tables of runs: mean and standard deviation over seeds, n shown, only comparable runs together."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cofima.report import metrics
from cofima.report.groups import Row, comparable, differences, rows
from cofima.report.metrics import Summary
from cofima.report.runs import Run

MISSING = "–"


@dataclass(frozen=True)
class Column:
    """One measure: its title, which direction is better (+1, -1, or 0 for neither), and what it means."""

    key: str
    title: str
    better: int
    of: Callable[[Run], float | None]
    meaning: str
    percent: bool = False


def _over_time(measure: Callable[[Run], float | None]) -> Callable[[Run], float | None]:
    """Give no value to joint training, which learns in one step, nor to a run without a finished task."""
    return lambda run: None if run.joint or not run.history else measure(run)


COLUMNS = (
    Column(
        "last_acc",
        "Last-Acc",
        +1,
        lambda run: metrics.last(run.matrix, run.sizes) if run.history else None,
        "Accuracy on the test images of all classes after the last task.",
        percent=True,
    ),
    Column(
        "inc_acc",
        "Inc-Acc",
        +1,
        _over_time(lambda run: metrics.incremental(run.matrix, run.sizes)),
        "Accuracy on all classes seen so far, averaged over the moments after each task.",
        percent=True,
    ),
    Column(
        "forgetting",
        "Forgetting",
        -1,
        _over_time(lambda run: metrics.forgetting(run.matrix)),
        "How many points earlier tasks fell, on average, from their best earlier accuracy; lower is better.",
        percent=True,
    ),
    Column(
        "distance",
        "Distance",
        0,
        lambda run: run.distances[-1] if run.history else None,
        "Euclidean distance of the backbone's weights from the pre-trained ones at the end.",
    ),
    Column(
        "seconds",
        "Seconds",
        -1,
        lambda run: sum(run.seconds) if run.history else None,
        "Time for all tasks: training, Fisher information, alignment and evaluation.",
    ),
)


@dataclass(frozen=True)
class Table:
    """Comparable runs as rows of text, with the numbers behind them."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]
    best: set[tuple[int, int]]  # cells (row, column) to set in bold
    groups: list[Row]
    values: list[list[Summary | None]]  # per row, one for each of COLUMNS


def build(runs: Sequence[Run]) -> list[Table]:
    """Make one table for each set of comparable runs; what sets a table apart is said in its note."""
    sets = comparable(runs)
    return [_table(number, members, sets) for number, members in enumerate(sets, start=1)]


def _table(number: int, members: list[Run], sets: list[list[Run]]) -> Table:
    pairs = [(row, _summaries(row)) for row in rows(members)]
    pairs.sort(key=lambda pair: _rank(*pair))
    groups, values = [row for row, _ in pairs], [found for _, found in pairs]
    decimals = [_decimals(column, [v[c] for v in values]) for c, column in enumerate(COLUMNS)]
    texts = [
        [row.label, str(len(row.runs)), *map(show, found, decimals)]
        for row, found in zip(groups, values, strict=True)
    ]
    return Table(
        title=(f"Table {number}: " if len(sets) > 1 else "") + _title(members[0]),
        note=" ".join(_notes(groups, number, sets)),
        columns=["Method", "n", *(column.title for column in COLUMNS)],
        rows=texts,
        best=_best(groups, texts),
        groups=groups,
        values=values,
    )


def _summaries(row: Row) -> list[Summary | None]:
    found: list[Summary | None] = []
    for column in COLUMNS:
        values = [value for run in row.runs if (value := column.of(run)) is not None]
        found.append(metrics.summarise(values) if values else None)
    return found


def _rank(row: Row, values: list[Summary | None]) -> tuple[bool, bool, float, str]:
    # From the weakest to the strongest, so that the bound in the last row follows the best method.
    return row.joint, not row.finished, values[0].mean if values[0] else -1.0, row.label


def show(value: Summary | None, decimals: int) -> str:
    """Write ``mean ± std``, the mean alone for a single seed, or a dash where there is nothing."""
    if value is None:
        return MISSING
    spread = "" if value.std is None else f" ± {value.std:.{decimals}f}"
    return f"{value.mean:.{decimals}f}{spread}"


def _decimals(column: Column, values: Sequence[Summary | None]) -> int:
    """Return the decimals of a column: two for accuracies, else three digits of its smallest value."""
    if column.percent:
        return 2
    smallest = min((value.mean for value in values if value and value.mean > 0), default=1.0)
    return min(max(2 - math.floor(math.log10(smallest)), 0), 6)


def _best(groups: list[Row], texts: list[list[str]]) -> set[tuple[int, int]]:
    """Mark the best cells of each column among finished methods; what reads the same is equally good."""
    able = [r for r, row in enumerate(groups) if not row.joint and row.finished]
    marked = set()
    for c, column in enumerate(COLUMNS, start=2):
        means = {r: float(texts[r][c].split(" ± ")[0]) for r in able if texts[r][c] != MISSING}
        if column.better and len(set(means.values())) > 1:
            top = max(means.values(), key=lambda mean: mean * column.better)
            marked |= {(r, c) for r, mean in means.items() if mean == top}
    return marked


def _title(run: Run) -> str:
    sizes = sorted({len(task) for task in run.tasks})
    classes = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    tasks = f"{run.planned} task{'s' if run.planned != 1 else ''}"
    return f"{run.dataset}, {run.backbone}, {tasks} of {classes} classes"


def _notes(groups: list[Row], number: int, sets: list[list[Run]]) -> list[str]:
    """Say on what the table rests, and what sets it apart from the first."""
    run = next((r for row in groups for r in row.runs if r.finished), groups[0].runs[0])
    fewest, most = (pick(len(row.runs) for row in groups) for pick in (min, max))
    parts = [
        f"Backbone {run.backbone} (sha256 {_hash(run.setup.backbone.get('sha256'))}),",
        f"dataset {run.dataset} (fingerprint {_hash(run.setup.data.get('fingerprint'))}{_split(run)}),",
        f"{sum(run.sizes)} {_tested(run)}{'' if run.finished else ' so far'}, accuracies in %;",
        f"n = {fewest if fewest == most else f'{fewest} to {most}'} seed{'s' if most > 1 else ''}"
        + (", mean ± standard deviation (n − 1)." if most > 1 else "."),
    ]
    if run.origin:
        parts.append(run.origin)
    repeats = sum(row.repeats for row in groups)
    if repeats:
        parts.append(f"{repeats} more with a config and seed already in the table: not counted again.")
    if number > 1:
        parts.append(f"Not comparable with table 1 ({'; '.join(_apart(sets[0], sets[number - 1]))}).")
    return parts


def _apart(first: list[Run], other: list[Run]) -> list[str]:
    return next(found for a in first for b in other if (found := differences(a, b)))


def _tested(run: Run) -> str:
    # Numbers by which settings were chosen must never be read as test results.
    return "training images held out, not the test images" if run.config.get("held_out") else "test images"


def _split(run: Run) -> str:
    name, digest = (run.setup.data.get(key) for key in ("split_id", "split_hash"))
    return f", split {name} {_hash(digest)}" if name and digest else ""


def _hash(value: object) -> str:
    return str(value)[:12] if value else "unknown"
