"""The texts of a report: of runs alone, or with them in tables of the paper, and tests where asked for."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from cofima.errors import CofimaError
from cofima.files import write_texts
from cofima.report import formats, paper_formats, tested
from cofima.report.page import drawings, html
from cofima.report.paper import fill
from cofima.report.runs import Run
from cofima.report.table import build


def texts(
    runs: Sequence[Run],
    keys: Sequence[str] = (),
    against: str | None = None,
    forms: Collection[str] = (),
) -> dict[str, str]:
    """Return the files of a report by their names; ``keys`` are tables of the paper.

    ``forms`` are the endings wanted, by default all: what nobody wants is not drawn.
    """
    if not runs:
        raise CofimaError("there are no runs to report")
    makers = _paper(runs, keys, against) if keys else _alone(runs, against)
    wanted = {name: make for name, make in makers.items() if not forms or name.rpartition(".")[2] in forms}
    found = {name: make() for name, make in wanted.items()}
    return found | (drawings(build(runs)) if not keys and (not forms or "svg" in forms) else {})


def write(runs: Sequence[Run], folder: str | Path) -> list[Path]:
    """Write report.md, .csv, .tex and .html and the main figures, each replaced as a whole or not at all."""
    return write_texts(texts(runs), folder)


def tests(runs: Sequence[Run], against: str | None) -> list[str]:
    """Return the tests of every table of runs as Markdown, to be printed below them."""
    return [tested.markdown([tested.of_table(table, against)]) for table in build(runs)] if against else []


def _alone(runs: Sequence[Run], against: str | None) -> dict[str, Callable[[], str]]:
    tables = build(runs)
    grids = [tested.of_table(table, against) for table in tables] if against else []
    found: dict[str, Callable[[], str]] = {
        "report.md": lambda: "\n".join(
            [formats.markdown(tables), *map(tested.markdown, [grids] if grids else [])]
        ),
        "report.csv": lambda: formats.csv_text(tables),
        "report.tex": lambda: formats.latex(tables) + tested.latex(grids),
        "report.html": lambda: html(runs, "".join(map(tested.html, grids))),
    }
    return found | ({"tests.csv": lambda: tested.csv_text(grids)} if grids else {})


def _paper(runs: Sequence[Run], keys: Sequence[str], against: str | None) -> dict[str, Callable[[], str]]:
    filled = [fill(key, runs) for key in dict.fromkeys(keys)]
    grids = [tested.of_paper(table, against) for table in filled if table.entries] if against else []
    name = "tables" if len(filled) > 1 else f"table-{filled[0].layout.key}"
    found: dict[str, Callable[[], str]] = {
        f"{name}.md": lambda: "\n".join(
            [paper_formats.markdown(filled), *map(tested.markdown, [grids] if grids else [])]
        ),
        f"{name}.csv": lambda: paper_formats.csv_text(filled),
        f"{name}.tex": lambda: paper_formats.latex(filled) + tested.latex(grids),
        f"{name}.html": lambda: html(
            runs, "".join([*map(paper_formats.html, filled), *map(tested.html, grids)])
        ),
    }
    return found | ({f"{name}-tests.csv": lambda: tested.csv_text(grids)} if grids else {})
