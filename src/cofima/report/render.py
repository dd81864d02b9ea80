"""Renderers of tables: Markdown, CSV, LaTeX and HTML."""

import csv
import io
import re
from collections.abc import Mapping, Sequence

from cofima.core.names import printable
from cofima.report.table import MISSING, Cell, Column, Table

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
    """Return tables in Markdown, with the best cells in bold."""
    return "\n".join(_markdown(table) for table in tables)


def csv_text(tables: Sequence[Table]) -> str:
    """Return the records of tables as CSV; all tables must have the same keys."""
    return csv_records([record for table in tables for record in table.records])


def csv_records(records: Sequence[Mapping[str, object]]) -> str:
    """Return records as CSV; floats are written with all digits, so that they are read back exactly."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]) if records else [], lineterminator="\n")
    writer.writerow({key: csv_cell(key) for key in writer.fieldnames})
    writer.writerows({key: csv_cell(value) for key, value in record.items()} for record in records)
    return out.getvalue()


def csv_cell(value: object) -> object:
    """Return the value of a cell; text that a spreadsheet would take for a formula gets an apostrophe."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip()[:1] in {*"=+-@"} and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def latex(tables: Sequence[Table]) -> str:
    r"""Return tables in LaTeX; the first line lists the required packages."""
    packages = ["booktabs", *(["graphicx", "amssymb"] if any(table.scaled for table in tables) else [])]
    needs = ", ".join(f"\\usepackage{{{name}}}" for name in packages)
    return f"% needs {needs}\n" + "\n".join(_latex(table) for table in tables)


def html(package: str, template: str, **values: object) -> str:
    """Render a template of a package; inserted values are escaped unless they are ``Markup``.

    The template may extend ``page.html``, a self-contained page, and import the macros of tables and figures.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    loader = ChoiceLoader([PackageLoader(name) for name in (package, "cofima.report")])
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    return environment.get_template(template).render(values)


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
    """Return text on one line, with Markdown and HTML markup escaped."""
    return re.sub(r"([\\`*_\[\]<>|&#~])", r"\\\1", " ".join(printable(text).split()))


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
    tops, rules, at = [], [], 1
    for head, below in table.heads:
        if head.text:
            tops.append(f"\\multicolumn{{{len(below)}}}{{c}}{{{_latex_cell(head, below[0])}}}")
            rules.append(f"\\cmidrule(lr){{{at}-{at + len(below) - 1}}}")
        else:
            tops += [" "] * len(below)
        at += len(below)
    titles = f"    {' & '.join(_tex(column.title) for column in table.columns)} \\\\"
    return [f"    {' & '.join(tops)} \\\\", f"    {' '.join(rules)}", titles] if rules else [titles]


def _latex_cell(cell: Cell, column: Column) -> str:
    mark = f"\\textsuperscript{{{cell.marks}}}" if cell.marks else ""
    if cell.text != MISSING and (cell.spread or column.number):
        mean = f"\\mathbf{{{cell.text}}}" if cell.best else cell.text
        spread = f" \\pm {cell.spread}" if cell.spread else ""
        return f"${mean}{spread}${f' ({cell.count})' if cell.count else ''}{mark}"
    text = _FORMULAS.get(str(cell)) or _tex(str(cell))
    return (f"\\textbf{{{text}}}" if cell.best else text) + mark


def _tex(text: str) -> str:
    """Return text on one line, with LaTeX commands escaped."""
    return "".join(_LATEX.get(char, char) for char in " ".join(printable(text).split()))
