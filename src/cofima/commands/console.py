"""What every command shares: where it prints, how it shows progress, what Ctrl-C says."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cofima import report, torchrun
from cofima.errors import CofimaError
from cofima.progress import SILENT, Progress
from cofima.terminal import TerminalProgress, print_table


def _look_there(root: Path | None) -> None:
    """Make a place known to all that looks for datasets, processes of a grid too."""
    if root is not None:
        os.environ["COFIMA_DATA"] = str(root.resolve())


DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        callback=_look_there,
        help="Where datasets are; else COFIMA_DATA and the present folder are searched.",
    ),
]
out = Console(quiet=not torchrun.is_main_process())  # of several processes, the first
errors = Console(stderr=True, quiet=not torchrun.is_main_process())
_quiet = False
GRACE = 20  # seconds by which the first may be later than another; then torchrun ends that at once


def be_quiet(quiet: bool) -> None:
    """Show results and errors only, or progress too."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    """Tell whether results and errors only are to be shown."""
    return _quiet


def progress() -> Progress:
    """Return who listens to long work."""
    return SILENT if _quiet or out.quiet else TerminalProgress(out)


def say(text: str) -> None:
    """Print a line as it is."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def complain(error: CofimaError) -> None:
    """Print what is wrong, once: other processes speak if the first did not, and so did not end them."""
    name, spoken = "cofima", errors
    if not torchrun.is_main_process():
        time.sleep(GRACE)
        name, spoken = f"cofima (process {os.environ['RANK']})", Console(stderr=True)
    spoken.print(f"{name}: {error}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def interruptible(
    kept: str = "finished tasks are kept, the same command continues after them",
) -> Iterator[None]:
    """Tell a user who presses Ctrl-C, or a system that ends a run, what is kept."""
    try:
        yield
    except KeyboardInterrupt as error:
        number = getattr(error, "signal", signal.SIGINT)
        errors.print(
            f"cofima: interrupted; {getattr(error, 'kept', '') or kept}", highlight=False, soft_wrap=True
        )
        raise typer.Exit(128 + number) from None


def print_runs(runs: list[report.Run]) -> None:
    """Print the tables of runs."""
    for comparison in report.compare(runs):
        print_table(out, comparison.table)
