"""The texts of a report: of runs alone, or with them in tables of the paper, and tests where asked for."""

from collections.abc import Sequence
from pathlib import Path

from cofima.errors import CofimaError
from cofima.report import formats, paper_formats, tested
from cofima.report.page import drawings, html, write_texts
from cofima.report.paper import fill
from cofima.report.runs import Run
from cofima.report.table import build


def texts(runs: Sequence[Run], keys: Sequence[str] = (), against: str | None = None) -> dict[str, str]:
    """Return every file of a report by its name; ``keys`` are tables of the paper."""
    if not runs:
        raise CofimaError("there are no runs to report")
    if keys:
        return _paper(runs, keys, against)
    tables = build(runs)
    grids = [tested.of_table(table, against) for table in tables] if against else []
    found = {
        "report.md": "\n".join([formats.markdown(tables), *([tested.markdown(grids)] if grids else [])]),
        "report.csv": formats.csv_text(tables),
        "report.tex": formats.latex(tables) + tested.latex(grids),
        "report.html": html(runs, "".join(map(tested.html, grids))),
        **drawings(tables),
    }
    return found | ({"tests.csv": tested.csv_text(grids)} if grids else {})


def write(runs: Sequence[Run], folder: str | Path) -> list[Path]:
    """Write report.md, .csv, .tex and .html and the main figures, each replaced as a whole or not at all."""
    return write_texts(texts(runs), folder)


def tests(runs: Sequence[Run], against: str | None) -> list[str]:
    """Return the tests of every table of runs as Markdown, to be printed below them."""
    return [tested.markdown([tested.of_table(table, against)]) for table in build(runs)] if against else []


def _paper(runs: Sequence[Run], keys: Sequence[str], against: str | None) -> dict[str, str]:
    filled = [fill(key, runs) for key in dict.fromkeys(keys)]
    grids = [tested.of_paper(table, against) for table in filled if table.entries] if against else []
    name = "tables" if len(filled) > 1 else f"table-{filled[0].layout.key}"
    sections = [*map(paper_formats.html, filled), *map(tested.html, grids)]
    found = {
        f"{name}.md": "\n".join(
            [paper_formats.markdown(filled), *([tested.markdown(grids)] if grids else [])]
        ),
        f"{name}.csv": paper_formats.csv_text(filled),
        f"{name}.tex": paper_formats.latex(filled) + tested.latex(grids),
        f"{name}.html": html(runs, "".join(sections)),
    }
    return found | ({f"{name}-tests.csv": tested.csv_text(grids)} if grids else {})
