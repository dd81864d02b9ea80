"""Renderers of the table model: Markdown, CSV, LaTeX and HTML."""

import csv
import io
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from cofima.report.table import MISSING, Cell, Column, Row, Table

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": r"$-$",
    "–": "--",
    "…": r"\ldots{}",
    "<": "$<$",
    ">": "$>$",
    "λ": r"$\lambda$",
    "θ": r"$\theta$",
    "×": r"$\times$",
    "✓": r"\checkmark",
    "✗": r"$\times$",
} | {char: f"\\{char}" for char in "&%$#_{}"}
_FORMULAS = {
    "θ_0": r"$\theta_0$",
    "θ*_{t−1}": r"$\theta^*_{t-1}$",
    "λ F_t": r"$\lambda F_t$",
    "1/t": "$1/t$",
}


def markdown(tables: Sequence[Table]) -> str:
    """Return tables in Markdown, the best cells in bold."""
    return "\n".join(_markdown(table) for table in tables)


def csv_text(tables: Sequence[Table]) -> str:
    """Return the records of tables as CSV; all tables have the same keys."""
    records = [record for table in tables for record in table.records]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def latex(tables: Sequence[Table]) -> str:
    r"""Return tables in LaTeX; the first line names the packages that they need."""
    packages = ["booktabs", *(["graphicx", "amssymb"] if any(table.scaled for table in tables) else [])]
    needs = ", ".join(f"\\usepackage{{{name}}}" for name in packages)
    return f"% needs {needs}\n" + "\n".join(_latex(table) for table in tables)


def html(table: Table, more: str = "") -> str:
    """Return a table with its notes as a section of a page; ``more`` follows the notes."""
    notes = f'<p class="soft">{escape(table.note)}</p>' if table.note else ""
    items = "".join(f"<li>{escape(note)}</li>" for note in table.footnotes)
    notes += f'<ul class="soft">{items}</ul>' if items else ""
    return f"<section>\n<h2>{escape(table.title)}</h2>\n{html_table(table)}\n{notes}{more}</section>"


def html_table(table: Table) -> str:
    """Return a table in a box that scrolls sideways, also by keyboard, so that the page does not."""
    style = f' class="{table.style}"' if table.style else ""
    body = "\n".join(_html_row(row, table.columns) for row in table.rows)
    whole = f"<table{style}><thead>{_html_head(table)}</thead><tbody>\n{body}\n</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">{whole}</div>'


def html_page(title: str, parts: Sequence[str]) -> str:
    """Return a self-contained page: no network, no script."""
    style = files("cofima.report").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def _markdown(table: Table) -> str:
    heads = [_md(Cell(f"{c.over} {c.title}" if c.over else c.title, marks=c.marks)) for c in table.columns]
    rules = ["---" if column.align == "left" else "---:" for column in table.columns]
    rows = [[_md(cell) for cell in row.cells] for row in table.rows]
    bars = [f"| {' | '.join(cells)} |" for cells in (heads, rules, *rows)]
    notes = [f"- {markdown_text(note)}" for note in table.footnotes] or [markdown_text(table.note)]
    return "\n".join([f"## {markdown_text(table.title)}", "", *bars, "", *notes, ""])


def _md(cell: Cell) -> str:
    text = f"**{markdown_text(str(cell))}**" if cell.best else markdown_text(str(cell))
    return text + (f"<sup>{cell.marks}</sup>" if cell.marks else "")


def markdown_text(text: str) -> str:
    """Return text on one line with Markdown and HTML markup escaped."""
    return re.sub(r"([\\`*_\[\]<>|&#~])", r"\\\1", " ".join(text.split()))


def _latex(table: Table) -> str:
    caption = f"{_tex(table.title)}.{' ' if table.note else ''}{_tex(table.note)}"
    aligned = "".join(column.align[0] for column in table.columns)
    lines = [r"\begin{table}", r"  \centering", f"  \\caption{{{caption}}}"]
    lines += [r"  \resizebox{\textwidth}{!}{%"] if table.scaled else []
    lines += [f"  \\begin{{tabular}}{{{aligned}}}", r"    \toprule", *_latex_heads(table), r"    \midrule"]
    for row in table.rows:
        lines += [r"    \midrule"] if row.rule else []
        cells = [_latex_cell(cell, column) for cell, column in zip(row.cells, table.columns, strict=True)]
        lines.append(f"    {' & '.join(cells)} \\\\")
    lines += [r"    \bottomrule", rf"  \end{{tabular}}{'}' if table.scaled else ''}"]
    if table.footnotes:
        lines += [r"  \par\smallskip\raggedright\footnotesize"]
        lines += [f"  {_tex(note)}\\par" for note in table.footnotes]
    return "\n".join([*lines, r"\end{table}", ""])


def _latex_heads(table: Table) -> list[str]:
    lines, at = [], 1
    if any(column.over for column in table.columns):
        tops, rules = [], []
        for over, marks, width in table.heads:
            text = _latex_cell(Cell(over, marks=marks), Column(over))
            tops.append(f"\\multicolumn{{{width}}}{{c}}{{{text}}}" if over else " ")
            rules += [f"\\cmidrule(lr){{{at}-{at + width - 1}}}"] if over else []
            at += width
        lines = [f"    {' & '.join(tops)} \\\\", f"    {' '.join(rules)}"]
    return [*lines, f"    {' & '.join(_tex(column.title) for column in table.columns)} \\\\"]


def _latex_cell(cell: Cell, column: Column) -> str:
    mark = f"\\textsuperscript{{{cell.marks}}}" if cell.marks else ""
    if cell.text != MISSING and (cell.spread or column.number):
        mean = f"\\mathbf{{{cell.text}}}" if cell.best else cell.text
        spread = f" \\pm {cell.spread}" if cell.spread else ""
        return f"${mean}{spread}${f' ({cell.count})' if cell.count else ''}{mark}"
    text = _FORMULAS.get(str(cell)) or _tex(str(cell))
    return (f"\\textbf{{{text}}}" if cell.best else text) + mark


def _tex(text: str) -> str:
    """Return text on one line with LaTeX commands escaped."""
    return "".join(_LATEX.get(char, char) for char in " ".join(text.split()))


def _html_head(table: Table) -> str:
    titles = [f'<th scope="col">{escape(column.title)}</th>' for column in table.columns]
    if not any(column.over for column in table.columns):
        return f"<tr>{''.join(titles)}</tr>"
    tops, below, at = [], [], 0
    for over, marks, width in table.heads:
        if over:
            inside = _html_cell(Cell(over, marks=marks))
            tops.append(f'<th colspan="{width}" scope="colgroup">{inside}</th>')
            below += titles[at : at + width]
        else:
            tops.append(titles[at].replace("<th", '<th rowspan="2"', 1))
        at += width
    return f"<tr>{''.join(tops)}</tr><tr>{''.join(below)}</tr>"


def _html_row(row: Row, columns: Sequence[Column]) -> str:
    kinds = " ".join([*(["theirs"] if row.quoted else []), *(["bound"] if row.rule else [])])
    first, *rest = map(_html_cell, row.cells)
    cells = "".join(
        f'<td class="text">{cell}</td>' if column.align == "left" else f"<td>{cell}</td>"
        for cell, column in zip(rest, columns[1:], strict=True)
    )
    style = f' class="{kinds}"' if kinds else ""
    return f'<tr{style}><th scope="row">{first}</th>{cells}</tr>'


def _html_cell(cell: Cell) -> str:
    text = f"<b>{escape(str(cell))}</b>" if cell.best else escape(str(cell))
    return text + (f"<sup>{cell.marks}</sup>" if cell.marks else "")
