"""The live table of a grid: which cells run, how far they are, and how long everything may take."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cofima.experiment.board import Board, Row
from cofima.experiment.grid import Lines, minutes, summary
from cofima.progress import Progress

ORDER = ("running", "failed", "waiting", "done")
STYLE = {"running": "", "failed": "red", "waiting": "dim", "done": "green"}


@contextmanager
def watching(console: Console, progress: Progress, quiet: bool) -> Iterator[Callable[[Board], None]]:
    """Yield what a grid is shown by: a table that changes in a terminal, lines elsewhere."""
    if quiet or not console.is_terminal:
        yield Lines(progress)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield lambda seen: live.update(table(seen, max(5, console.height - 6)))


def table(seen: Board, height: int) -> Group:
    """Draw the rows that matter most, as many as there is room for, and a line about all."""
    rows = sorted(seen.rows.values(), key=lambda row: (ORDER.index(row.state), -(row.ended or 0)))
    rows = [row for row in rows if row.counts or row.state in ("running", "failed")]
    shown = Table("cell", "state", "task", "accuracy", "elapsed", "left", box=None, pad_edge=False)
    for row in rows[:height]:
        shown.add_row(*cells(row))
    more = f"... and {len(rows) - height} more" if len(rows) > height else ""
    return Group(shown, Text(more, "dim"), Text(summary(seen)))


def cells(row: Row) -> list[Text]:
    """Return a row's name, state, tasks, accuracy so far, and times."""
    state = f"{row.state}, first task shared" if row.taken and row.state == "running" else row.state
    fault = f": {row.fault.splitlines()[0]}" if row.fault else ""
    left = row.left if row.state == "running" else None
    words = [
        row.name,
        state + fault,
        f"{row.task}/{row.tasks}" if row.tasks else "",
        "" if row.accuracy is None else f"{row.accuracy:.1f} %",
        "" if row.elapsed is None else minutes(row.elapsed),
        "" if left is None else minutes(left),
    ]
    return [Text(word, STYLE[row.state], overflow="ellipsis", no_wrap=True) for word in words]
