"""Tables as Markdown, CSV and LaTeX."""

import csv
import io
import re
from collections.abc import Sequence

from cofima.report.table import COLUMNS, MISSING, Table

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
} | {char: f"\\{char}" for char in "&%$#_{}"}
# what else of the backbone's identity stands in a line for programs
BACKBONE = [
    "backbone_alias",
    "backbone_pretraining",
    "backbone_overlap",
    "backbone_layout",
    "backbone_final_norm",
]


def markdown(tables: Sequence[Table]) -> str:
    """Return the tables in Markdown, the best of each column in bold."""
    return "\n".join(_markdown_table(table) for table in tables)


def csv_text(tables: Sequence[Table]) -> str:
    """Return one line a row, with unrounded numbers, for programs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    facts = ["table", "title", "label", "method", "n", "seeds", "tasks_done", "tasks_planned", "dataset"]
    facts += ["dataset_fingerprint", "split_id", "split_hash", "backbone", "backbone_sha256", *BACKBONE]
    writer.writerow(facts + [f"{column.key}_{part}" for column in COLUMNS for part in ("mean", "std")])
    for number, table in enumerate(tables, start=1):
        for row, values in zip(table.groups, table.values, strict=True):
            run = row.runs[0]
            seeds = " ".join(str(each.seed) for each in row.runs)
            learnt = [len(run.history), run.planned]
            source = [run.dataset, *map(run.setup.data.get, ("fingerprint", "split_id", "split_hash"))]
            source += [run.backbone, run.setup.backbone.get("sha256")]
            source += [run.setup.backbone.get(key.removeprefix("backbone_"), "") for key in BACKBONE]
            numbers = [part for value in values for part in ((value.mean, value.std) if value else ("", ""))]
            start = [number, table.title, row.label, run.method, len(row.runs), seeds]
            writer.writerow([*start, *learnt, *source, *numbers])
    return out.getvalue()


def latex(tables: Sequence[Table]) -> str:
    r"""Return the tables for a paper that loads ``booktabs``, the best of each column in bold."""
    return "% needs \\usepackage{booktabs}\n" + "\n".join(_latex_table(table) for table in tables)


def _markdown_table(table: Table) -> str:
    lines = [
        f"## {plain(table.title)}",
        "",
        bar(table.columns),
        bar(["---", *["---:"] * (len(table.columns) - 1)]),
    ]
    for r, row in enumerate(table.rows):
        cells = [plain(cell) for cell in row]
        lines.append(bar([f"**{cell}**" if (r, c) in table.best else cell for c, cell in enumerate(cells)]))
    return "\n".join([*lines, "", plain(table.note), ""])


def bar(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def plain(text: str) -> str:
    """Return text on one line in which Markdown and HTML see no markup."""
    return re.sub(r"([\\`*_\[\]<>|&#~])", r"\\\1", " ".join(text.split()))


def _latex_table(table: Table) -> str:
    lines = [
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{tex(table.title)}. {tex(table.note)}}}",
        f"  \\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
        r"    \toprule",
        f"    {' & '.join(map(tex, table.columns))} \\\\",
        r"    \midrule",
    ]
    for r, (group, row) in enumerate(zip(table.groups, table.rows, strict=True)):
        if group.joint and r and not table.groups[r - 1].joint:
            lines.append(r"    \midrule")
        cells = [
            tex(row[0]),
            row[1],
            *(_tex_number(cell, (r, c) in table.best) for c, cell in enumerate(row[2:], 2)),
        ]
        lines.append(f"    {' & '.join(cells)} \\\\")
    return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""])


def _tex_number(cell: str, bold: bool) -> str:
    if cell == MISSING:
        return "--"
    mean, *spread = cell.split(" ± ")
    shown = f"\\mathbf{{{mean}}}" if bold else mean
    return "$" + " \\pm ".join([shown, *spread]) + "$"


def tex(text: str) -> str:
    """Return text on one line in which LaTeX sees no commands."""
    return "".join(_LATEX.get(char, char) for char in " ".join(text.split()))
