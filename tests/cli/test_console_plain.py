"""The console prints text literally, and escapes control characters of untrusted text."""

import io
import re

import pytest
from rich.table import Table

from cofima.cli import console
from cofima.cli.console import PlainConsole, TerminalProgress, print_table, say
from cofima.report.table import Cell, Column, Row
from cofima.report.table import Table as Plain

HOSTILE = "[red]a[/b] \x1b]0;pwned\x07\x9b31m\u202e :smile:"
SHOWN = r"[red]a[/b] \x1b]0;pwned"


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    text = io.StringIO()
    made = PlainConsole(file=text, force_terminal=request.param, width=200, color_system="truecolor")
    monkeypatch.setattr(console, "_console", lambda *_: made)
    return text


def sent(screen: io.StringIO) -> str:
    """Return what was printed, without the codes that rich itself sends to a terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())


def test_no_way_of_printing_lets_a_control_character_through(screen: io.StringIO) -> None:
    say(HOSTILE)
    table = Table("class", HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE, "1")
    console.out().print(table)
    print_table(Plain(HOSTILE, [Column(HOSTILE)], [Row([Cell(HOSTILE)])], note=HOSTILE))
    progress = TerminalProgress(console.out())
    with progress.stage(HOSTILE):
        progress.say(HOSTILE)
        list(progress.track([1], 1, HOSTILE))
    text = sent(screen)
    assert text.count(SHOWN) >= 8
    assert ":smile:" in text
    for mark in "\x1b\x07\x9b\u202e":
        assert mark not in text
