"""Tests of a report's tables against one row, and as text in every format."""

import csv
import io
from collections.abc import Sequence
from html import escape

from cofima.report.details import scroll
from cofima.report.formats import bar, plain, tex
from cofima.report.paper import PaperTable, name_of
from cofima.report.significance import Grid, grid
from cofima.report.table import COLUMNS, Table


def of_table(table: Table, reference: str) -> Grid:
    """Test the finished rows of a table of runs against one of them; joint training is left out."""
    rows, known = {}, {}
    for row in table.groups:
        if row.joint or not row.finished:
            continue
        known[row.label] = row.runs[0].method
        rows[row.label] = {
            column.title: {int(run.seed): value for run in row.runs if (value := column.of(run)) is not None}
            for column in COLUMNS
            if column.percent
        }
    return grid(f"Tests: {table.title}", rows, known, reference)


def of_paper(table: PaperTable, reference: str) -> Grid:
    """Test our rows of a table of the paper against one of them; joint training is left out."""
    entries = [entry for entry in table.entries if entry.line.method != "joint"]
    rows = {e.label: {name_of(column): e.values(column) for column in table.columns} for e in entries}
    known = {entry.label: entry.line.method for entry in entries}
    return grid(f"Tests: table {table.layout.key}", rows, known, reference)


def markdown(grids: Sequence[Grid]) -> str:
    """Return tests in Markdown."""
    return "\n".join(_markdown(each) for each in grids)


def latex(grids: Sequence[Grid]) -> str:
    """Return tests for a paper that loads ``booktabs`` and ``graphicx``."""
    return "\n".join(_latex(each) for each in grids)


def csv_text(grids: Sequence[Grid]) -> str:
    """Return tests with one line a row, as they are shown."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for each in grids:
        writer.writerow(["title", *each.columns])
        writer.writerows([each.title, *row] for row in each.rows)
    return out.getvalue()


def html(each: Grid) -> str:
    """Return tests as a section of a page."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in each.columns)
    rows = [
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in each.rows
    ]
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    note = f'<p class="soft">{escape(each.note)}</p>'
    return f"<section><h2>{escape(each.title)}</h2>{scroll(whole, each.title)}{note}</section>"


def _markdown(each: Grid) -> str:
    lines = [f"## {plain(each.title)}", "", bar([plain(column) for column in each.columns])]
    lines.append(bar(["---", *["---:"] * (len(each.columns) - 1)]))
    lines += [bar([plain(cell) for cell in row]) for row in each.rows]
    return "\n".join([*lines, "", plain(each.note), ""])


def _latex(each: Grid) -> str:
    rows = [f"    {' & '.join(map(tex, row))} \\\\" for row in each.rows]
    lines = [
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{tex(each.title)}. {tex(each.note)}}}",
        r"  \resizebox{\textwidth}{!}{%",
        f"  \\begin{{tabular}}{{l{'r' * (len(each.columns) - 1)}}}",
        r"    \toprule",
        f"    {' & '.join(map(tex, each.columns))} \\\\",
        r"    \midrule",
    ]
    return "\n".join([*lines, *rows, r"    \bottomrule", r"  \end{tabular}}", r"\end{table}", ""])
