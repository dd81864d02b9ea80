"""``cofima grid``: every cell of a recipe's grid."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cofima import report
from cofima.commands import console
from cofima.commands.console import DataRoot, errors, interruptible, print_runs, progress
from cofima.commands.grid_plan import print_json, print_plan
from cofima.commands.grid_table import watching
from cofima.experiment import engines
from cofima.experiment.cells import name, plan, reduced
from cofima.experiment.forecast import forecast
from cofima.experiment.grid import Outcome, run_grid
from cofima.experiment.worker import LOG
from cofima.progress import SILENT


class Where(StrEnum):
    """What runs the cells."""

    local = "local"
    ray = "ray"
    slurm = "slurm"


def grid(
    config: Annotated[
        str, typer.Argument(help="A YAML file with a key grid, or a recipe of the package: desk.yaml.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="What differs, in every cell.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where the cells' folders go; by default in runs/.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Cells at a time; by default one per GPU, else per core."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="KEY=VALUE[,VALUE]", help="Leave other cells out; may be given again."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="A trial: so many images of each class, and one epoch."),
    ] = None,
    engine: Annotated[
        Where, typer.Option("--engine", help="What runs the cells: this machine, a Ray cluster, Slurm.")
    ] = Where.local,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="The Ray cluster: auto, HOST:PORT or ray://HOST:PORT; without it one is started here. "
            "With --engine slurm: local, to try it without Slurm.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells, their data and their time; learn nothing.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="With --dry-run: whole configurations.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --dry-run: everything, for programs.")
    ] = False,
    data_root: DataRoot = None,
) -> None:
    """Learn every combination of a recipe's grid; the same command continues, and repeats what failed."""
    planned = plan(config, reduced(limit, overrides or []), only or [])
    suffix = "" if limit is None else f"-limit{limit}"
    where = folder or Path("runs") / f"{Path(config).stem}{suffix}"
    cells, needs = [cell for cell, _ in planned], {name(cell): needed for cell, needed in planned}
    if dry_run:
        width = jobs or os.cpu_count() or 1
        found = forecast(cells, where, width, progress=SILENT if as_json else progress())
        print_json(found) if as_json else print_plan(found, width, verbose)
        return
    with interruptible():
        runs = engines.make(engine.value, where, jobs, address, cells)
        with watching(console.out, progress(), console.is_quiet()) as watch:
            outcome = run_grid(cells, where, progress=progress(), engine=runs, watch=watch, needs=needs)
    _finish(outcome)


def _finish(outcome: Outcome) -> None:
    """Print the table of what is done, then what failed, and where to read more."""
    if outcome.done:
        print_runs(report.find(outcome.done))
    for failed, fault in outcome.failed.items():
        errors.print(f"cofima: {failed} failed: {fault}", highlight=False, markup=False, soft_wrap=True)
        errors.print(f"  see {failed / LOG}", highlight=False, markup=False, soft_wrap=True)
    if outcome.failed:
        raise typer.Exit(1)
