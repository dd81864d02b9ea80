"""Untrusted YAML is parsed to plain values, or raises a one-line error, in bounded time."""

import time
from itertools import pairwise

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cofima.core.plain_yaml import YamlError, parse

LETTERS = "abcdefghij"


def laughs(start: str, again: str) -> str:
    """Ten lines, each of which stands for ten of the line before."""
    lines = [f"a: &a {start}"]
    for before, own in pairwise(LETTERS):
        lines.append(f"{own}: &{own} {again % ', '.join([f'*{before}'] * 10)}")
    return "\n".join(lines)


CHAIN = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 400))])
REFUSED = {
    "not what its tag says": ["0b_", "!!int foo", "!!float x", "!!bool maybe", "!!int ''", "!!float ''"],
    "a number of [0-9,]+ characters": ["1" * 5000, "0x" + "f" * 50_000, "1:" * 50_000 + "1"],
    "contains itself": ["&a [*a]", "&a {x: *a}", "x: &a {y: [1, *a]}"],
    "levels deep": ["[" * 100_000, "{a: " * 100_000, "- " * 100_000, CHAIN],
    "more than 100,000 values": [laughs("[x]", "[%s]"), laughs("{k: 1}", "{<<: [%s], z: 1}")],
    "could not determine a constructor": [
        "!!python/object/apply:os.system [x]",
        "!!set {a}",
        "!!binary aGk=",
    ],
    "is not a name": ["1: 2", "null: 1", "true: 2", "? [a]\n: b", "? {a: b}\n: c"],
    "characters are more than": ["#" * 1_000_001],
    "": [
        "a: b: c",
        "\x00",
        "a: \x1b",
        "*a",
        "&",
        "a: 1\n---\nb: 2",
        "<<: 1",
        "\ud800",
        "!<x> y",
        "\t",
        '"""',
    ],
}


def test_what_is_no_plain_yaml_is_one_line_and_soon(subtests: pytest.Subtests) -> None:
    for reason, texts in REFUSED.items():
        for text in texts:
            with subtests.test(ascii(text[:40])):
                start = time.process_time()
                with pytest.raises(YamlError, match=reason or None) as caught:
                    parse(text)
                assert time.process_time() - start < 2
                assert "\n" not in str(caught.value)
                assert len(str(caught.value)) < 300


def test_a_date_is_a_text_and_aliases_that_are_few_are_fine() -> None:
    assert parse("seed: 2024-13-45") == {"seed": "2024-13-45"}
    assert parse("[2024-01-01, =]") == ["2024-01-01", "="]
    assert parse("a: &a {x: 1}\nb: {<<: *a, y: [*a]}") == {"a": {"x": 1}, "b": {"x": 1, "y": [{"x": 1}]}}
    assert parse("") is None


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=15, deadline=None)
@given(VALUES)
def test_it_reads_what_pyyaml_writes(value: object) -> None:
    assert parse(yaml.safe_dump(value)) == value
