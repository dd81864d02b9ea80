"""Console output, progress bars and shared options of commands; plain lines without a terminal."""

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
from rich.control import Control
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment
from rich.table import Table as RichTable
from rich.text import Text
from typer.core import TyperCommand, TyperOption

from cofima.core import torchrun
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.core.names import printable
from cofima.core.progress import SILENT, Progress

if TYPE_CHECKING:
    from cofima.report import Run
    from cofima.report.table import Cell, Table

T = TypeVar("T")
GRACE = 20  # seconds for the main process to print its error; torchrun then ends the others
TEXT = 15  # minimum width of a text column; longer words are broken
UNLIMITED = 10_000  # columns
TIMES = 27  # columns of a progress line behind its bar: percent, time so far, time left
BAR = (10, 40)  # columns of the bar, at least and at most
ERASE = Control((ControlType.CARRIAGE_RETURN,), (ControlType.ERASE_IN_LINE, 2))
_quiet = False
_starting: Console | None = None
_bars: Bars | None = None  # those on the screen


class PlainConsole(Console):
    """Console that prints text literally: no markup, and control characters are escaped.

    Names of classes, files and runs are untrusted, and a terminal executes control sequences.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield escaped segments; rich's own control codes are kept."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def out() -> Console:
    """Return the console for results and progress."""
    started()
    return _console(False, os.environ.get("COLUMNS"))


def err() -> Console:
    """Return the console for errors, warnings and notes."""
    started()
    return _console(True, os.environ.get("COLUMNS"))


def started() -> None:
    """Erase the line that is shown while a command loads."""
    global _starting
    if _starting is not None:
        _starting.control(ERASE)
        _starting = None


class Command(TyperCommand):
    """Command that shows a line at once, as importing torch takes seconds."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; ``--no-...`` stands with the words of its option, as its own column is cut."""
        both = [one for one in self.params if isinstance(one, TyperOption) and one.secondary_opts]
        before = [(param.secondary_opts, param.help) for param in both]
        for param in both:
            param.help = f"{param.help} Off: {param.secondary_opts[0]}."
            param.secondary_opts = []
        try:
            super().format_help(ctx, formatter)
        finally:
            for param, (names, text) in zip(both, before, strict=True):
                param.secondary_opts, param.help = names, text

    def invoke(self, ctx: Any) -> Any:
        """Run the command; the line disappears before anything else is printed."""
        global _starting
        console = out()
        if console.is_terminal and not _quiet:
            console.print(f"cofima {self.name}: starting ...", end="", style="dim", highlight=False)
            _starting = console
        try:
            return super().invoke(ctx)
        finally:
            started()


@cache
def _console(stderr: bool, columns: str | None) -> Console:
    # rich reads COLUMNS only when a console is created, so there is one console per value. It is cached, as
    # lines and a live display on two different consoles would overwrite each other.
    return PlainConsole(stderr=stderr, quiet=not torchrun.is_main_process())


def _set_data_root(root: Path | None) -> None:
    """Search this folder for datasets, also in the processes of a grid."""
    if root is not None:
        os.environ["COFIMA_DATA"] = str(root.resolve())


def out_option(help: str) -> Any:
    """Return the option ``--out``, ``-o`` of every command that writes."""
    return typer.Option("--out", "-o", help=help)


def read_model(text: str) -> Path:
    """Return the folder of a model to read: the given folder, or that of a model downloaded from the hub."""
    from cofima.store import hub

    if not hub.is_address(text):
        return Path(text)
    say(f"fetching {text}", err())  # to stderr, as another program may read the results
    found = hub.fetch(text)
    say(f"{found} is in {found.folder}", err())
    return found.folder


def _own_model(text: str) -> Path:
    from cofima.store import hub

    if hub.is_address(text):
        raise CofimaError(
            f"{text} is on the hub and cannot be changed there: fetch it (hf download), change the copy, and "
            "push it (cofima push)"
        )
    return Path(text)


ModelFolder = Annotated[Path, typer.Argument(parser=_own_model, metavar="MODEL", help="A model folder.")]
AnyModel = Annotated[  # for read_model
    str, typer.Argument(metavar="MODEL", help="A model folder, or hf://OWNER/NAME@REVISION on the hub.")
]
Photos = Annotated[
    Path, typer.Argument(help="A folder with one subfolder per class, or a CSV file (path,label).")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Maximum number of epochs.")]
SkipUnreadable = Annotated[bool, typer.Option("--skip-unreadable", help="Skip unreadable images.")]
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
    cls: type[TyperCommand] = Command,
) -> None:
    """Add commands, each with an example that starts with the command's name: ``learn photos -o parts``."""
    for function, example in commands:
        # typer parses help as markup, in which "cofima[app]" would be a tag
        text = escape(_paragraphs(inspect.getdoc(function) or ""))
        epilog = escape(f"Example: {parent} {example}")
        app.command(example.split()[0], cls=cls, help=text, epilog=epilog)(function)


def _paragraphs(text: str) -> str:
    """Return a text with one line for each paragraph, which any terminal can break where it ends."""
    return "\n\n".join(" ".join(part.split("\n")) for part in text.split("\n\n"))


def set_quiet(quiet: bool) -> None:
    """Print results and errors only."""
    global _quiet
    _quiet = quiet


def progress() -> Progress:
    """Return the progress display of long-running work."""
    # not out(): the startup line stays until work starts
    console = _console(False, os.environ.get("COLUMNS"))
    return SILENT if _quiet or console.quiet else TerminalProgress(console)


def say(text: str, console: Console | None = None, style: str | None = None) -> None:
    """Print a line literally: no markup, no highlighting, no wrapping."""
    (console or out()).print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning."""
    say(f"warning: {text}", err(), "yellow")


def complain(error: CofimaError) -> None:
    """Print an error once for all processes of a run.

    The main process prints it, and torchrun then ends the others. If an error occurs only in another process,
    that one prints it after a delay.
    """
    name, console = "cofima", err()
    if not torchrun.is_main_process():
        time.sleep(GRACE)
        name, console = f"cofima (process {torchrun.rank()})", PlainConsole(stderr=True)
    say(f"{name}: {error}", console)


def show_warnings() -> None:
    """Print warnings of this package as one line each; other warnings are printed by Python as usual."""
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
    """On Ctrl-C or SIGTERM, print what was saved, and exit with the code of the signal."""
    try:
        yield
    except KeyboardInterrupt as error:
        if _bars is not None:  # what is interrupted may not take its bar away before this is printed
            _bars.stop()
        number = getattr(error, "signal", signal.SIGINT)
        say(f"cofima: interrupted; {getattr(error, 'kept', '') or kept}", err())
        raise typer.Exit(128 + number) from None


def _bar_width(console: Console) -> int:
    return max(BAR[0], min(BAR[1], console.width // 4 - 8))


class _Work(ProgressColumn):
    """Name of the work, as long as bar and times leave room for: of a long one, its step stays."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def render(self, task: Task) -> Text:
        """Return the name, shortened."""
        room = max(BAR[0], self.console.width - TIMES - _bar_width(self.console) - 2)
        text = task.description
        if len(text) > room:
            stage, dot, step = text.rpartition(" · ")
            left = room - len(dot + step) - 1
            text = (
                f"{stage[:left].rstrip(' ,')}…{dot}{step}" if stage and left > 0 else f"{step[: room - 1]}…"
            )
        return Text(text, no_wrap=True)


class _Bar(BarColumn):
    """Bar that leaves room for the times, whatever the terminal's width."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def render(self, task: Task) -> ProgressBar:
        """Return the bar."""
        self.bar_width = _bar_width(self.console)
        return super().render(task)


class TerminalProgress(Progress):
    """A single progress bar for a command: of all announced work, or else of the current step's items."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bars = Bars(
            _Work(console),
            _Bar(console),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.bar = self.bars.add_task("", start=False, total=None)
        self.expected = self.done = 0.0
        self.label = ""
        self.depth = 0  # nesting of steps and stages

    def expect(self, work: float) -> None:
        """Add to the total work of the bar."""
        self.expected += work

    def worked(self, work: float) -> None:
        """Advance the bar."""
        self.done += work
        if self.expected:  # an estimate may be too small; the bar is only full when the command is done
            self.bars.update(self.bar, total=self.expected, completed=min(self.done, 0.99 * self.expected))

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        """Yield ``items``, with their count shown after the name of the step."""
        name = f"{self.label} · {label}" if self.label else label
        with self._shown():
            for done, item in enumerate(items):
                self.bars.update(self.bar, description=f"{name} {done}/{total}")
                if not self.expected:
                    self.bars.update(self.bar, total=total, completed=done)
                yield item

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        started()
        self.console.print(message, highlight=False, markup=False)

    @contextmanager
    def stage(self, label: str) -> Iterator[None]:
        """Prefix each step with the name of the stage; without a terminal, print a line when it starts."""
        self.label = label
        if not self.console.is_terminal:
            self.say(label)
        try:
            with self._shown():
                self.bars.update(self.bar, description=label)
                yield
        finally:
            self.label = ""

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Show the bar until the outermost step or stage ends."""
        global _bars
        started()
        if not self.depth:
            self.bars.start_task(self.bar)  # elapsed time starts with the first step
            self.bars.start()
            _bars = self.bars
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if not self.depth:
                self.bars.stop()
                _bars = None


def print_runs(runs: Sequence[Run]) -> None:
    """Print the tables of runs."""
    from cofima import report

    for comparison in report.compare(runs):
        print_table(comparison.table)


def print_table(table: Table) -> None:
    """Print a table; if it is too wide, text is wrapped, but numbers are never truncated."""
    console = out()
    narrow = _least_width(console, table, narrow=False) > console.width
    before, least = console.width, _least_width(console, table, narrow)
    if least > before:  # the terminal then wraps the lines: better than truncated numbers
        console.width = least
    console.print(_rich_table(table, narrow))
    if least > before:
        console.width = before
    if table.note:
        console.print(table.note, highlight=False, markup=False, style="dim")


def _rich_table(table: Table, narrow: bool, tight: bool = False) -> RichTable:
    """Return a table for the terminal; if ``tight``, with text columns at their minimum width.

    A ``narrow`` one has no borders, breaks titles, and puts standard deviations below their means.
    """
    shown = RichTable(title=table.title or None, title_justify="left")
    if narrow:
        shown.box, shown.pad_edge = None, False
    for place, column in enumerate(table.columns):
        title = column.title.replace(" ", "\n") if narrow else column.title
        if column.align == "right":
            shown.add_column(title, justify="right", no_wrap=True)
            continue
        words = [word for row in table.rows for word in str(row.cells[place]).split()]
        least = min(TEXT, max(map(len, [*words, *title.split()]), default=1))
        shown.add_column(title, overflow="fold", min_width=least, max_width=least if tight else None)
    for row in table.rows:
        shown.add_row(*(_rich_cell(cell, narrow) for cell in row.cells))
    return shown


def _rich_cell(cell: Cell, narrow: bool) -> Text:
    text = str(cell).replace(" ± ", "\n± ") if narrow and cell.spread else str(cell)
    return Text(text, "bold" if cell.best else "")


def _least_width(console: Console, table: Table, narrow: bool) -> int:
    """Return the minimum width at which a table shows all its numbers."""
    options = console.options.update(width=UNLIMITED)
    return Measurement.get(console, options, _rich_table(table, narrow, tight=True)).maximum + 2


def plain_table(*columns: str) -> RichTable:
    """Return an empty table without borders."""
    return RichTable(*columns, box=None, pad_edge=False)
