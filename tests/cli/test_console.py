"""Console output: a line at startup, one progress bar per command, and numbers that are never truncated."""

import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from cofima.cli import console
from cofima.cli.console import TerminalProgress, print_table, register, say
from cofima.report.history import history_table
from cofima.report.table import Cell, Column, Row, Table
from cofima.store.history import HistoryRow, OldClasses


class Terminal:
    """A terminal that remembers what was written to it."""

    def __init__(self, width: int = 80) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=True, width=width, color_system=None)

    @property
    def text(self) -> str:
        """Everything written so far."""
        return self.file.getvalue()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    screen = Terminal()
    monkeypatch.setattr(console, "_console", lambda *_: screen.console)
    return screen


def test_a_line_is_there_before_a_command_loads_anything(terminal: Terminal) -> None:
    seen = []

    def slow() -> None:
        """Load torch."""
        seen.append(terminal.text)
        say("loaded")

    def other() -> None:
        """Do nothing."""

    app = typer.Typer()
    register(app, "cofima", (slow, "slow"), (other, "other"))
    CliRunner().invoke(app, ["slow"])
    assert seen == ["cofima slow: starting ..."]
    assert terminal.text == "cofima slow: starting ...\r\x1b[2Kloaded\n"  # the line is erased


def test_an_error_erases_the_line_too(terminal: Terminal) -> None:
    def wrong() -> None:
        """Fail."""
        raise ValueError

    def other() -> None:
        """Do nothing."""

    app = typer.Typer()
    register(app, "cofima", (wrong, "wrong"), (other, "other"))
    CliRunner().invoke(app, ["wrong"])
    assert terminal.text.endswith("\r\x1b[2K")


def state(progress: TerminalProgress) -> Any:
    (task,) = progress.bars.tasks  # one bar, whatever happens
    return task


def test_one_bar_counts_all_announced_work(terminal: Terminal) -> None:
    progress = TerminalProgress(terminal.console)
    progress.expect(100)
    seen = []
    with progress.stage("CoFiMA: task 1/2"):
        for _ in progress.track(range(2), 2, "epoch 1/1"):
            seen.append((state(progress).description, state(progress).percentage))
            progress.worked(15)
        for _ in progress.track(range(1), 1, "fisher"):
            seen.append((state(progress).description, state(progress).percentage))
            progress.worked(20)
    with progress.stage("CoFiMA: task 2/2"):
        for _ in progress.track(range(1), 1, "epoch 1/1"):
            seen.append((state(progress).description, state(progress).percentage))
    assert seen == [
        ("CoFiMA: task 1/2 · epoch 1/1 0/2", 0),
        ("CoFiMA: task 1/2 · epoch 1/1 1/2", 15),
        ("CoFiMA: task 1/2 · fisher 0/1", 30),
        ("CoFiMA: task 2/2 · epoch 1/1 0/1", 50),
    ]
    progress.worked(1000)
    assert state(progress).percentage == 99  # an announcement that was too small


def test_without_announced_work_the_bar_counts_items(terminal: Terminal) -> None:
    progress = TerminalProgress(terminal.console)
    seen = [state(progress).percentage for _ in progress.track(range(4), 4, "images")]
    assert seen == [0, 25, 50, 75]
    assert not progress.bars.live.is_started


@pytest.mark.parametrize("width", [72, 80, 120])
def test_long_names_leave_room_for_the_bar_and_the_time_left(width: int) -> None:
    screen = Terminal(width)
    progress = TerminalProgress(screen.console)
    progress.expect(100)
    with progress.stage("CoFiMA: Aston Martin V8 Vantage Convertible 2012, Acura TSX Sedan 2012 and 9 more"):
        for _ in progress.track(range(2), 2, "epoch 3/10"):
            progress.worked(50)
            progress.bars.refresh()
    line = next(line for line in screen.text.replace("\r", "\n").split("\n") if "50%" in line)
    assert re.search(r"CoFiMA: .*… · epoch 3/10 \d/2 +━.* 50% +\d:\d\d:\d\d [-\d]:[-\d]+:[-\d]+ left", line)


def test_what_is_said_after_an_interruption_stands_on_a_line_of_its_own(terminal: Terminal) -> None:
    progress = TerminalProgress(terminal.console)
    items = progress.track(range(4), 4, "images")
    next(items)
    with pytest.raises(typer.Exit) as ended, console.interruptible("stopped"):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert terminal.text.endswith("\x1b[2Kcofima: interrupted; stopped\n")  # the line of the bar is erased
    items.close()


def test_a_stage_that_fails_takes_its_bar_away(terminal: Terminal) -> None:
    progress = TerminalProgress(terminal.console)
    with pytest.raises(ValueError, match="x"), progress.stage("learning"):
        raise ValueError("x")
    assert not progress.bars.live.is_started
    assert progress.label == ""


NUMBER = re.compile(r"\d+\.\d+")


def shown(table: Table, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    screen = Terminal(width)
    monkeypatch.setattr(console, "_console", lambda *_: screen.console)
    print_table(table)
    return screen.text


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_no_number_of_a_report_is_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CoFiMA (classifier=lda, drift=linear, fisher.share=equal, lam=auto)"
    columns = [Column("Method", "left"), Column("n")]
    columns += [Column(title, number=True) for title in ("Last-Acc", "Inc-Acc", "Forgetting", "Distance")]
    numbers = [("94.15", "0.12"), ("93.76", "0.34"), ("12.10", "1.05"), ("1.9497", "0.0108")]
    rows = [Row([Cell(name), Cell("3"), *(Cell(mean, spread) for mean, spread in numbers)])]
    text = shown(Table("", columns, rows), width, monkeypatch)
    assert sorted(NUMBER.findall(text)) == sorted(text for pair in numbers for text in pair)
    assert "…" not in text
    if width >= 80:
        assert max(map(len, text.splitlines())) <= width


def test_the_history_fits_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    old = OldClasses(before=81.0, after=79.5, measured=False, rests_on="an estimate")
    row = HistoryRow(kind="more images", task=2, classes=[f"electric guitar {n}" for n in range(9)], old=old)
    row.train_images, row.lam, row.date = 12345, 0.45, "2026-01-02T03:04:05+00:00"
    row.accuracy, row.sizes = [99.9], [10]
    text = shown(history_table([row]), 80, monkeypatch)
    assert max(map(len, text.splitlines())) <= 80
    for number in ("12345", "99.9", "~81.0 -> 79.5", "0.45", "2026-01-02"):
        assert number in text
