"""``cofima grid``: every cell of a recipe's grid."""

import os
from pathlib import Path
from typing import Annotated

import typer

from cofima import report
from cofima.commands.console import DataRoot, errors, interruptible, print_runs, progress, say
from cofima.experiment.cells import cells, name
from cofima.experiment.grid import run_grid


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
        int | None, typer.Option("--jobs", "-j", min=1, help="Cells at a time; by default one per core.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="KEY=VALUE[,VALUE]", help="Leave other cells out; may be given again."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells, and do nothing.")] = False,
    data_root: DataRoot = None,
) -> None:
    """Learn every combination of a recipe's grid; the same command continues, and repeats what failed."""
    chosen = cells(config, overrides or [], only or [])
    where = folder or Path("runs") / Path(config).stem
    if dry_run:
        for cell in chosen:
            say(str(where / name(cell)))
        say(f"{len(chosen)} cells")
        return
    with interruptible():
        outcome = run_grid(chosen, where, jobs or os.cpu_count() or 1, progress())
    if outcome.done:
        print_runs(report.find(outcome.done))
    for failed, fault in outcome.failed.items():
        errors.print(f"cofima: {failed} failed: {fault}", highlight=False, markup=False, soft_wrap=True)
    if outcome.failed:
        raise typer.Exit(1)
