"""``cofima grid``: run the cells of a recipe's grid, with a dry run and a live table."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cofima.cli.console import (
    DataRoot,
    Overrides,
    err,
    interruptible,
    out,
    out_option,
    plain_table,
    print_runs,
    progress,
    say,
    started,
)
from cofima.core.progress import SILENT, Progress

if TYPE_CHECKING:
    from cofima.experiment.grid.estimate import Forecast
    from cofima.experiment.grid.scheduler import GridOutcome
    from cofima.experiment.grid.status import CellStatus, GridStatus

ORDER = ("running", "failed", "waiting", "done")
STYLE = {"running": "", "failed": "red", "waiting": "dim", "done": "green"}


def grid(
    config: Annotated[
        str, typer.Argument(help="A YAML file with a key grid, or a packaged recipe: desk.yaml.")
    ],
    overrides: Overrides = None,
    folder: Annotated[Path | None, out_option("Folder of the grid; by default in runs/.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Parallel cells; by default one per GPU, else per core."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE[,VALUE]", help="Run matching cells only; may be repeated."),
    ] = None,
    max_per_class: Annotated[
        int | None, typer.Option(min=1, help="Trial run: maximum number of images per class, one epoch.")
    ] = None,
    executor: Annotated[
        Literal["local", "ray", "slurm"],
        typer.Option(help="Where to run cells: this machine, a Ray cluster, or Slurm."),
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster: auto, HOST:PORT or ray://HOST:PORT; by default one is started here. "
            "With --executor slurm: local, to try it without Slurm.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List cells, data and estimated times without running.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="With --dry-run: full configurations.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
    data_root: DataRoot = None,
) -> None:
    """Run all combinations of a recipe's grid; the same command resumes, and retries failed cells."""
    from cofima.experiment.grid import executors
    from cofima.experiment.grid.cells import name, plan, reduced
    from cofima.experiment.grid.estimate import forecast
    from cofima.experiment.grid.scheduler import run_grid

    planned = plan(config, reduced(max_per_class, overrides or []), only or [])
    suffix = "" if max_per_class is None else f"-max{max_per_class}"
    where = folder or Path("runs") / f"{Path(config).stem}{suffix}"
    cells, needs = [cell for cell, _ in planned], {name(cell): needed for cell, needed in planned}
    if dry_run:
        width = jobs or os.cpu_count() or 1
        found = forecast(cells, where, width, progress=SILENT if as_json else progress())
        print_json(found) if as_json else print_plan(found, width, verbose)
        return
    with interruptible():
        runs = executors.make(executor, where, jobs, address, cells)
        with watching(out(), progress()) as watch:
            outcome = run_grid(cells, where, progress=progress(), executor=runs, watch=watch, needs=needs)
    print_outcome(outcome)


def print_outcome(outcome: GridOutcome) -> None:
    """Print the table of finished cells, then each failure with its log; exit with 1 if a cell failed."""
    from cofima import report
    from cofima.experiment.grid.worker import LOG

    if outcome.done:
        print_runs(report.find(outcome.done))
    for failed, fault in outcome.failed.items():
        say(f"cofima: {failed} failed: {fault}", err())
        say(f"  see {failed / LOG}", err())
    if outcome.failed:
        raise typer.Exit(1)


def print_plan(found: Sequence[Forecast], jobs: int, verbose: bool) -> None:
    """Print a block per cell, each missing dataset once, and the total."""
    import yaml

    from cofima.experiment.config import as_overrides
    from cofima.experiment.grid.status import minutes

    for one in found:
        say(str(one.folder))
        if verbose:
            text = yaml.safe_dump(one.config.model_dump(mode="json"), sort_keys=False)
            say("\n".join(f"    {line}" for line in text.splitlines()))
        else:
            say(f"    {' '.join(as_overrides(one.config))}")
        time = "time not known" if one.seconds is None else f"about {minutes(one.seconds)}"
        say(f"    data: {one.data}; weights: {one.weights}; {'done' if one.done else time}")
    for text in dict.fromkeys(one.missing for one in found if one.missing):
        say(f"\n{text}")
    todo = [one for one in found if not one.done]
    seconds = [one.seconds for one in todo if one.seconds is not None]
    done = f", {len(found) - len(todo)} of them done" if len(todo) < len(found) else ""
    say(f"\n{len(found)} cells{done}")
    if seconds:
        missing = len(todo) - len(seconds)
        unknown = f", and {missing} whose time is not known" if missing else ""
        say(f"about {minutes(sum(seconds) / jobs)} on this machine, {jobs} at a time{unknown}")
        say("(images times the measured time of a step, at random weights; first tasks that cells share too)")


def print_json(found: Sequence[Forecast]) -> None:
    """Print the forecast of each cell as JSON."""
    rows = [
        {
            "folder": str(one.folder),
            "done": one.done,
            "config": one.config.model_dump(mode="json"),
            "data": {"here": not one.missing, "where": one.data, "images": one.images, "tasks": one.tasks},
            "weights": one.weights,
            "seconds": one.seconds,
        }
        for one in found
    ]
    started()
    print(json.dumps(rows, indent=2))  # not with rich, which would wrap it


@contextmanager
def watching(console: Console, progress: Progress) -> Iterator[Callable[[GridStatus], None]]:
    """Yield the display of a grid: a live table in a terminal, lines elsewhere."""
    from cofima.experiment.grid.status import StatusLines

    if progress is SILENT or not console.is_terminal:
        yield StatusLines(progress)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield lambda status: live.update(status_table(status, max(5, console.height - 6)))


def status_table(status: GridStatus, height: int) -> Group:
    """Return a table of the most relevant rows that fit, and a summary line."""
    from cofima.experiment.grid.status import summary

    rows = sorted(status.rows.values(), key=lambda row: (ORDER.index(row.state), -(row.ended or 0)))
    rows = [row for row in rows if row.counts or row.state in ("running", "failed")]
    shown = plain_table("cell", "state", "task", "accuracy", "elapsed", "left")
    for row in rows[:height]:
        shown.add_row(*_cells(row))
    more = f"... and {len(rows) - height} more" if len(rows) > height else ""
    return Group(shown, Text(more, "dim"), Text(summary(status)))


def _cells(row: CellStatus) -> list[Text]:
    """Return a row's name, state, tasks, accuracy so far, and times."""
    from cofima.experiment.grid.status import minutes

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
