"""Tables of the paper as Markdown, LaTeX, CSV and HTML."""

import csv
import io
from collections.abc import Sequence
from html import escape

from cofima.report.details import scroll
from cofima.report.footnotes import PAPER
from cofima.report.formats import bar, plain, tex
from cofima.report.layouts import BACKBONES, DATASETS
from cofima.report.paper import Entry, PaperTable
from cofima.report.printed import Cell, Printed, PrintedRow, printed, record
from cofima.report.published import published
from cofima.report.table import MISSING

_SYMBOLS = {
    "θ_0": r"$\theta_0$",
    "θ*_{t−1}": r"$\theta^*_{t-1}$",
    "λ": r"$\lambda$",
    "λ F_t": r"$\lambda F_t$",
    "1/t": "$1/t$",
    "✓": r"\checkmark",
    "✗": r"$\times$",
}
_FACTS = ["table", "method", "label", "memory_free", "backbone", "init", "lambda", "dataset", "metric"]
_NUMBERS = ["mean", "std", "n", "seeds", "published_mean", "published_std", "published_source"]


def markdown(tables: Sequence[PaperTable]) -> str:
    """Return the tables in Markdown, the best of each column in bold."""
    return "\n".join(_markdown(printed(table)) for table in tables)


def csv_text(tables: Sequence[PaperTable]) -> str:
    """Return one line a cell, with unrounded numbers, ours and those of the paper, for programs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_FACTS, *_NUMBERS])
    for table in tables:
        lines = dict.fromkeys([*table.layout.lines, *(entry.line for entry in table.entries)])
        for line in lines:
            mine: list[Entry | None] = [entry for entry in table.entries if entry.line == line]
            for entry in mine or [None]:
                for column in table.columns:
                    known, value = record(line, column, table.layout.key), entry and entry.summary(column)
                    if known is None and value is None:
                        continue
                    free = "" if line.memory_free is None else str(line.memory_free).lower()
                    lam = (entry.lam if entry else "") or line.lam
                    label = entry.label if entry else line.name
                    start = [table.layout.key, line.method, label, free, BACKBONES[line.backbone], line.init]
                    seeds = " ".join(map(str, entry.values(column))) if entry else ""
                    ours = [value.mean, value.std, value.n, seeds] if value else ["", "", "", ""]
                    source = f"{published().paper}, {published().sources[table.layout.key]}"
                    theirs = [known.mean, known.std, source] if known else ["", "", ""]
                    writer.writerow([*start, lam, DATASETS[column[0]], column[1], *ours, *theirs])
    return out.getvalue()


def latex(tables: Sequence[PaperTable]) -> str:
    r"""Return the tables for a paper that loads ``booktabs``, ``graphicx`` and ``amssymb``."""
    head = "% needs \\usepackage{booktabs}, \\usepackage{graphicx}, \\usepackage{amssymb}\n"
    return head + "\n".join(_latex(printed(table)) for table in tables)


def html(table: PaperTable) -> str:
    """Return a table as a section of a page."""
    shown = printed(table)
    tops = "".join(f'<th rowspan="2" scope="col">{escape(head)}</th>' for head in shown.heads)
    tops += "".join(
        f'<th colspan="{len(metrics)}" scope="colgroup">{_html(cell)}</th>' for cell, metrics in shown.groups
    )
    subs = "".join(f'<th scope="col">{escape(m)}</th>' for _, metrics in shown.groups for m in metrics)
    body = "\n".join(_html_row(row) for row in shown.rows)
    head = f"<thead><tr>{tops}</tr><tr>{subs}</tr></thead>"
    whole = f'<table class="paper">{head}<tbody>\n{body}\n</tbody></table>'
    notes = "".join(f"<li>{escape(note)}</li>" for note in shown.notes)
    title = escape(shown.title)
    return f'<section><h2>{title}</h2>{scroll(whole, shown.title)}<ul class="soft">{notes}</ul></section>'


def _markdown(table: Printed) -> str:
    numbers = [f"{cell.text} {metric}" for cell, metrics in table.groups for metric in metrics]
    marks = [cell.marks for cell, metrics in table.groups for _ in metrics]
    heads = [*map(plain, table.heads), *(_md(Cell(n, marks=m)) for n, m in zip(numbers, marks, strict=True))]
    lines = [f"## {plain(table.title)}", "", bar(heads)]
    lines.append(bar([*["---"] * len(table.heads), *["---:"] * len(numbers)]))
    lines += [bar([*map(_md, row.heads), row.whose, *map(_md, row.cells)]) for row in table.rows]
    return "\n".join([*lines, "", *(f"- {plain(note)}" for note in table.notes), ""])


def _md(cell: Cell) -> str:
    text = f"**{plain(cell.text)}**" if cell.bold else plain(cell.text)
    return text + (f"<sup>{cell.marks}</sup>" if cell.marks else "")


def _latex(table: Printed) -> str:
    count = sum(len(metrics) for _, metrics in table.groups)
    first = len(table.heads) + 1
    tops, rules, at = [" & ".join(" " for _ in table.heads)], [], first
    for cell, metrics in table.groups:
        tops.append(f"\\multicolumn{{{len(metrics)}}}{{c}}{{{_tex(cell)}}}")
        rules.append(f"\\cmidrule(lr){{{at}-{at + len(metrics) - 1}}}")
        at += len(metrics)
    subs = [*(_symbol(head) for head in table.heads), *(m for _, ms in table.groups for m in ms)]
    lines = [
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{tex(table.title)}.}}",
        r"  \resizebox{\textwidth}{!}{%",
        f"  \\begin{{tabular}}{{{'l' * len(table.heads)}{'r' * count}}}",
        r"    \toprule",
        f"    {' & '.join(tops)} \\\\",
        f"    {' '.join(rules)}",
        f"    {' & '.join(subs)} \\\\",
        r"    \midrule",
    ]
    for row in table.rows:
        lines += [r"    \midrule"] if row.rule else []
        cells = [*map(_tex, row.heads), row.whose, *map(_tex, row.cells)]
        lines.append(f"    {' & '.join(cells)} \\\\")
    lines += [r"    \bottomrule", r"  \end{tabular}}", r"  \par\smallskip\raggedright\footnotesize"]
    lines += [f"  {_symbols(tex(note))}\\par" for note in table.notes]
    return "\n".join([*lines, r"\end{table}", ""])


def _tex(cell: Cell) -> str:
    mark = f"\\textsuperscript{{{cell.marks}}}" if cell.marks else ""
    if cell.text == MISSING:
        return "--" + mark
    mean, found, spread = cell.text.partition(" ± ")
    if not found:
        return (f"\\textbf{{{_symbol(cell.text)}}}" if cell.bold else _symbol(cell.text)) + mark
    shown = f"\\mathbf{{{mean}}}" if cell.bold else mean
    spread, _, count = spread.partition(" ")
    return f"${shown} \\pm {spread}${f' {count}' if count else ''}{mark}"


def _symbol(text: str) -> str:
    return _SYMBOLS.get(text) or _symbols(tex(text))


def _symbols(text: str) -> str:
    return text.replace("λ", r"$\lambda$").replace("θ", r"$\theta$").replace("×", r"$\times$")


def _html(cell: Cell) -> str:
    text = f"<b>{escape(cell.text)}</b>" if cell.bold else escape(cell.text)
    return text + (f"<sup>{cell.marks}</sup>" if cell.marks else "")


def _html_row(row: PrintedRow) -> str:
    kinds = " ".join([*(["theirs"] if row.whose == PAPER else []), *(["bound"] if row.rule else [])])
    first, *rest = [*map(_html, row.heads), row.whose]
    cells = "".join(f'<td class="text">{cell}</td>' for cell in rest)
    cells += "".join(f"<td>{_html(cell)}</td>" for cell in row.cells)
    return f'<tr class="{kinds}"><th scope="row">{first}</th>{cells}</tr>'
