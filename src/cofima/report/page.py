"""The report as files: one page without network or script, and tables for programs and papers."""

import re
import shlex
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from cofima.report import figure
from cofima.report.details import block, details, scroll
from cofima.report.groups import Row
from cofima.report.runs import Run
from cofima.report.table import COLUMNS, Table, build

THEME = {colour: f"var(--series-{place})" for place, colour in enumerate(figure.SERIES)} | {
    figure.INK: "var(--ink)",
    figure.GRID: "var(--grid)",
}


def drawings(tables: Sequence[Table]) -> dict[str, str]:
    """Return the figures of each table as files of their own, for papers and slides."""
    found: dict[str, str] = {}
    for number, table in enumerate(tables, start=1):
        which = f"-{number}" if len(tables) > 1 else ""
        drawn = {"accuracy": figure.accuracy(table.groups), "distance": figure.distance(table.groups)}
        found |= {f"{name}{which}.svg": svg for name, svg in drawn.items() if svg is not None}
    return found


def html(runs: Sequence[Run], first: str = "") -> str:
    """Return the whole report as one HTML page; ``first`` are sections that come before all others."""
    tables = build(runs)
    style = files("cofima.report").joinpath("page.css").read_text(encoding="utf-8")
    title = "cofima report" + (f": {tables[0].title}" if len(tables) == 1 else "")
    body = [
        "<h1>cofima report</h1>",
        f'<p class="soft">{_count(len(runs), "run")} in {_count(len(tables), "table")}</p>',
        first,
        *(_section(table, number) for number, table in enumerate(tables, start=1)),
        _meanings(),
        "<section><h2>Runs</h2>",
        *(details(run) for run in _unique(tables)),
        "</section>",
        "<section><h2>This report again</h2>",
        block(f"cofima report {shlex.join(str(run.folder) for run in _unique(tables))}"),
        "</section>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(table: Table, number: int) -> str:
    rows = table.groups
    wide = [
        _figure(
            figure.accuracy(rows),
            f"t{number}a",
            "Accuracy on all classes seen, after each task" + _band(rows) + _dashed(rows),
        ),
        _figure(
            figure.distance(rows),
            f"t{number}d",
            "Distance of the backbone from its pre-trained weights, after each task" + _band(rows),
        ),
    ]
    small = [
        _figure(
            figure.matrix(row), f"t{number}m{place}", f"{row.label}: accuracy on each task, after each task"
        )
        for place, row in enumerate(rows)
    ]
    least = 20 if any(len(row.runs[0].history) > 8 for row in rows) else 14
    return "\n".join(
        [
            f"<section>\n<h2>{escape(table.title)}</h2>",
            scroll(_html_table(table), table.title),
            f'<p class="soft">{escape(table.note)}</p>',
            f'<div class="figures" style="--least: 24rem">{"".join(wide)}</div>',
            f'<div class="figures" style="--least: {least}rem">{"".join(small)}</div>\n</section>',
        ]
    )


def _html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    lines = []
    for r, (row, cells) in enumerate(zip(table.groups, table.rows, strict=True)):
        shown = [f"<b>{escape(x)}</b>" if (r, c) in table.best else escape(x) for c, x in enumerate(cells)]
        numbers = "".join(f"<td>{cell}</td>" for cell in shown[1:])
        bound = ' class="bound"' if row.joint and r and not table.groups[r - 1].joint else ""
        lines.append(f'<tr{bound}><th scope="row">{shown[0]}</th>{numbers}</tr>')
    body = "\n".join(lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _figure(svg: str | None, name: str, caption: str) -> str:
    """Set a drawing into the page: in the colours of the page, with ids of its own, and with words for it."""
    if svg is None:
        return ""
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", svg).replace("xlink:href", "href")
    svg = re.sub(r"(fill|stroke): (#\w{6})", lambda m: f"{m[1]}: {THEME.get(m[2], m[2])}", svg)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if size is None:
        raise ValueError("a figure has no viewBox")
    width = 1.5 * float(size[1])  # a point is 4/3 pixels; more would fill the page with huge letters
    start = f'<svg {size[0]} role="img" aria-label="{escape(caption)}" style="max-width: {width:.0f}px">'
    svg = start + svg[svg.index(">") + 1 :]
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>\n"


def _band(rows: Sequence[Row]) -> str:
    return "; the band is one standard deviation over seeds" if any(len(row.runs) > 1 for row in rows) else ""


def _dashed(rows: Sequence[Row]) -> str:
    return "; dashed: all classes learnt at once" if any(row.joint for row in rows) else ""


def _meanings() -> str:
    rest = {
        "n": "Number of runs, which differ in their seed only.",
        "Joint": "All classes learnt at once from all images: the upper bound, never marked as best.",
        "Bold": "The best finished method of the column.",
    }
    pairs = {column.title: column.meaning for column in COLUMNS} | rest
    items = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs.items())
    return f"<section><h2>What the numbers mean</h2>\n<dl>\n{items}\n</dl></section>"


def _unique(tables: Sequence[Table]) -> list[Run]:
    """Return the runs in the order of the tables, a bound that stands in several tables once."""
    return list({run.folder: run for table in tables for row in table.groups for run in row.runs}.values())


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"
