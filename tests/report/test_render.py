"""Names that others chose are text in every format: no formula, no command, no markup."""

import csv
import io

import pytest

from cofima.report.render import csv_cell, csv_text, html, latex, markdown
from cofima.report.table import Cell, Column, Row, Table

NAMES = [
    "=HYPERLINK(1)",
    "+1+1",
    "-2+3",
    "@SUM(1)",
    "\t=1",
    " =1",
    "<script>x</script>",
    "a|b",
    "\x1b]0;x\x07",
]
NAMES += ["$x_$", r"\input{/etc/passwd}", "[a](javascript:b)", "![a](b)", "a\u202eb", "`rm`", "{{ 7 * 7 }}"]


def table(name: str) -> Table:
    records = [{"class": name, name: "1", "share": -0.5, "text": "-0.5"}]
    return Table(name, [Column(name, over=name)], [Row([Cell(name)])], note=name, records=records)


@pytest.mark.parametrize("name", NAMES)
def test_a_spreadsheet_sees_no_formula(name: str) -> None:
    head, row = csv.reader(io.StringIO(csv_text([table(name)])))
    assert not [cell for cell in (head[1], row[0]) if cell.strip()[:1] in tuple("=+-@")]
    assert row[2:] == ["-0.5", "-0.5"]  # numbers stay numbers
    assert not any(mark in cell for cell in (*head, *row) for mark in "\x1b\x07\u202e")


def test_a_number_is_no_formula() -> None:
    assert [csv_cell(text) for text in ("-1", "+2.5", "-inf", "1e-3", "-")] == [
        "-1",
        "+2.5",
        "-inf",
        "1e-3",
        "'-",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_markdown_and_latex_show_the_name(name: str) -> None:
    page = html("cofima.report", "macros.html", title=name) + html("cofima.report", "page.html", title=name)
    text, source = markdown([table(name)]), latex([table(name)])
    assert "<script>" not in page + text
    assert "](" not in text.replace("\\]", "")
    assert r"\input{" not in source
    assert "\n## " not in text[3:]
    assert not any(mark in page + text + source for mark in "\x1b\x07\u202e")
