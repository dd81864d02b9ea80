"""Untrusted text: shown without control sequences, and refused as class names."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from cofima.core.names import LONGEST, is_control, json_line, name_fault, printable, shortened

HOSTILE = "a\x1b]0;pwned\x07\x9b31m\u202egpj\u2028\r\x00\ud800"


def test_control_characters_are_written_out() -> None:
    assert printable(HOSTILE) == r"a\x1b]0;pwned\x07\x9b31m\u202egpj\u2028\x0d\x00\ud800"
    assert printable("two\nlines\t") == "two\nlines\t"
    assert (
        printable("Straße 東京 👍🏽 a\u200db") == "Straße 東京 👍🏽 a\u200db"
    )  # joiners belong to scripts and emoji


@given(st.text(max_size=40))
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    assert not any(map(is_control, printable(text, keep="")))
    assert not any(map(is_control, shortened(text, 20)))
    assert printable(printable(text)) == printable(text)


@settings(max_examples=20, deadline=None)
@given(st.recursive(st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_a_line_of_json_is_the_value_and_has_no_control_character(value: object) -> None:
    line = json_line(value)
    assert json.loads(line) == value
    assert not any(map(is_control, line))


def test_names_of_classes() -> None:
    assert not any(map(name_fault, ["screw", "wood screw, 4 x 40", "Straße", "=1+1", "<b>", "x" * LONGEST]))
    assert name_fault("x" * (LONGEST + 1)) == f"{LONGEST + 1} characters are more than {LONGEST}"
    assert name_fault(" ") == "the name is empty"
    for name in ("a\nb", "a\x1bb", "a\u202eb", "a\x9bb"):
        assert "control characters" in name_fault(name)
