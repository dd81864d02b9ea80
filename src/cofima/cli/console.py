"""Console output, progress bars and options that commands share; plain lines where there is no terminal."""

from __future__ import annotations

import inspect
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text
from typer.core import TyperCommand

from cofima.core import torchrun
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.core.names import printable
from cofima.core.progress import SILENT, Progress

if TYPE_CHECKING:
    from cofima.report import Run
    from cofima.report.table import Table

T = TypeVar("T")
GRACE = 20  # seconds that the main process gets to print its error; torchrun then ends the others
_quiet = False


class PlainConsole(Console):
    """Console that shows every text as it is: no markup, and control characters written out.

    Names of classes, files and runs may come from anybody, and a terminal obeys what it is sent.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the pieces of something to show; rich's own codes for the terminal stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def out() -> Console:
    """Return the console of results and progress."""
    return _console(False, os.environ.get("COLUMNS"))


def err() -> Console:
    """Return the console of errors, warnings and notes."""
    return _console(True, os.environ.get("COLUMNS"))


@cache
def _console(stderr: bool, columns: str | None) -> Console:
    # rich reads COLUMNS once, when a console is built, so each value has its own. One console is kept for
    # all that is printed with it: lines and a live display would overwrite each other on two.
    return PlainConsole(stderr=stderr, quiet=not torchrun.is_main_process())


def _set_data_root(root: Path | None) -> None:
    """Search this folder for datasets, in the processes of a grid too."""
    if root is not None:
        os.environ["COFIMA_DATA"] = str(root.resolve())


def out_option(help: str) -> Any:
    """Return the option ``--out``, ``-o`` of every command that writes."""
    return typer.Option("--out", "-o", help=help)


ModelFolder = Annotated[Path, typer.Argument(help="A model folder.")]
Photos = Annotated[Path, typer.Argument(help="A folder per class, or a CSV file (path,label).")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Passes over the images, at most.")]
SkipUnreadable = Annotated[bool, typer.Option("--skip-unreadable", help="Leave unreadable images out.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        callback=_set_data_root,
        help="Folder of the datasets; by default COFIMA_DATA and the current folder are searched.",
    ),
]


def register(
    app: typer.Typer,
    parent: str,
    *commands: tuple[Callable[..., None], str],
    cls: type[TyperCommand] | None = None,
) -> None:
    """Add commands, each with an example whose first word is its name: ``learn photos -o parts``."""
    for function, example in commands:
        # typer reads help as markup, in which "cofima[app]" is a tag
        text = escape(inspect.getdoc(function) or "")
        epilog = escape(f"Example: {parent} {example}")
        app.command(example.split()[0], cls=cls, help=text, epilog=epilog)(function)


def set_quiet(quiet: bool) -> None:
    """Print results and errors only."""
    global _quiet
    _quiet = quiet


def progress() -> Progress:
    """Return the progress display of long-running work."""
    return SILENT if _quiet or out().quiet else TerminalProgress(out())


def say(text: str, console: Console | None = None, style: str | None = None) -> None:
    """Print a line as it is: no markup, no highlighting, no wrapping."""
    (console or out()).print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning."""
    say(f"warning: {text}", err(), "yellow")


def complain(error: CofimaError) -> None:
    """Print an error once for all processes of a run.

    The main process prints it, and torchrun then ends the others. An error that only another process has is
    printed by that one, after a wait.
    """
    name, console = "cofima", err()
    if not torchrun.is_main_process():
        time.sleep(GRACE)
        name, console = f"cofima (process {torchrun.rank()})", PlainConsole(stderr=True)
    say(f"{name}: {error}", console)


def show_warnings() -> None:
    """Print warnings of this package as one line each; others stay as Python prints them."""
    plain = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, CofimaWarning):
            warn(str(message))
        else:
            plain(message, category, *rest, **named)

    warnings.showwarning = show


@contextmanager
def interruptible(
    kept: str = "finished tasks are kept, the same command continues after them",
) -> Iterator[None]:
    """On Ctrl-C or SIGTERM, print what is kept, and exit with the code of the signal."""
    try:
        yield
    except KeyboardInterrupt as error:
        number = getattr(error, "signal", signal.SIGINT)
        say(f"cofima: interrupted; {getattr(error, 'kept', '') or kept}", err())
        raise typer.Exit(128 + number) from None


class TerminalProgress(Progress):
    """One bar for the current step, with the name of the stage that it belongs to."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.label = ""

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        """Yield ``items`` with a bar that disappears when they are done."""
        self.bars.start()
        bar = self.bars.add_task(f"{self.label} · {label}" if self.label else label, total=total)
        try:
            for item in items:
                yield item
                self.bars.advance(bar)
        finally:
            self.bars.remove_task(bar)
            if not self.bars.tasks:  # one bar may run inside another
                self.bars.stop()

    def say(self, message: str) -> None:
        """Print one line above the bars."""
        self.console.print(message, highlight=False, markup=False)

    @contextmanager
    def stage(self, label: str) -> Iterator[None]:
        """Name the stage in front of each bar; without a terminal, print a line when it begins."""
        self.label = label
        if not self.console.is_terminal:
            self.say(label)
        try:
            yield
        finally:
            self.label = ""


def print_runs(runs: Sequence[Run]) -> None:
    """Print the tables of runs."""
    from cofima import report

    for comparison in report.compare(runs):
        print_table(comparison.table)


def print_table(table: Table) -> None:
    """Print a table; the names of its rows are not wrapped."""
    shown = RichTable(title=table.title or None, title_justify="left")
    for column in table.columns:
        shown.add_column(column.title, justify=column.align, no_wrap=column is table.columns[0])
    for row in table.rows:
        shown.add_row(*(Text(str(cell), "bold" if cell.best else "") for cell in row.cells))
    out().print(shown)
    if table.note:
        out().print(table.note, highlight=False, markup=False, style="dim")


def plain_table(*columns: str) -> RichTable:
    """Return an empty table without lines."""
    return RichTable(*columns, box=None, pad_edge=False)
