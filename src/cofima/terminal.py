"""What a person sees in a terminal: bars, tables, messages; plain lines where there is no terminal."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table as RichTable
from rich.text import Text

from cofima.errors import CofimaWarning
from cofima.progress import Progress
from cofima.report.table import Table

T = TypeVar("T")


class TerminalProgress(Progress):
    """Draw one bar for the work at hand, below the name of the wider work it belongs to."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.wider = ""

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        """Yield ``items`` with a bar that disappears when they are done."""
        with self._drawing():
            bar = self.bars.add_task(f"{self.wider} · {label}" if self.wider else label, total=total)
            try:
                for item in items:
                    yield item
                    self.bars.advance(bar)
            finally:
                self.bars.remove_task(bar)

    def say(self, message: str) -> None:
        """Print one line above the bars."""
        self.console.print(message, highlight=False, markup=False)

    @contextmanager
    def stage(self, label: str) -> Iterator[None]:
        """Name the wider work; without a terminal, say when it begins."""
        self.wider = label
        if not self.console.is_terminal:
            self.say(label)
        try:
            yield
        finally:
            self.wider = ""

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        started = not self.bars.live.is_started
        if started:
            self.bars.start()
        try:
            yield
        finally:
            if started:
                self.bars.stop()


def print_table(console: Console, table: Table) -> None:
    """Print a table with its note."""
    shown = RichTable(title=table.title or None, title_justify="left")
    for column in table.columns:
        shown.add_column(column.title, justify=column.align, no_wrap=column.align == "left")
    for row in table.rows:
        shown.add_row(*(Text(str(cell), "bold" if cell.best else "") for cell in row.cells))
    console.print(shown)
    if table.note:
        console.print(table.note, highlight=False, markup=False, style="dim")


def show_warnings(console: Console) -> None:
    """Print our own warnings as one line each, and leave others as they are."""
    plain = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, CofimaWarning):
            console.print(f"warning: {message}", highlight=False, markup=False, style="yellow")
        else:
            plain(message, category, filename, lineno, file, line)

    warnings.showwarning = show
