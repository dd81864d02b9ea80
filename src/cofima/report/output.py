"""Report files by name: of runs alone, or of the paper's tables filled with runs."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from cofima.core.atomic import write_texts
from cofima.core.errors import CofimaError
from cofima.report import significance
from cofima.report.comparison import Comparison, compare
from cofima.report.html import drawings, page
from cofima.report.paper import tables as paper
from cofima.report.paper.protocol import Recipe, fill
from cofima.report.render import csv_text, latex, markdown
from cofima.report.runs import Run
from cofima.report.table import Table


def texts(runs: Sequence[Run], against: str | None = None, forms: Collection[str] = ()) -> dict[str, str]:
    """Return the files of a report by name.

    Args:
        runs: The runs.
        against: Row to test all others against, if any.
        forms: File extensions to create; by default all. Figures are only drawn if needed.
    """
    _refuse_none(runs)
    comparisons = compare(runs)
    tests = tests_of(comparisons, against)
    tables = [each.table for each in comparisons]
    found = _files(("report", "tests"), tables, tests, lambda: page(runs, tests), forms)
    return found | (drawings(comparisons) if not forms or "svg" in forms else {})


def paper_texts(
    runs: Sequence[Run],
    keys: Sequence[str],
    recipe: Recipe,
    against: str | None = None,
    forms: Collection[str] = (),
) -> dict[str, str]:
    """Return the files of a report in the layout of the paper's tables; see :func:`texts`.

    Args:
        runs: Runs, whether or not they follow the paper's protocol.
        keys: The paper's tables.
        recipe: Returns the settings of the paper's protocol for a run.
        against: Row to test all others against, if any.
        forms: File extensions to create; by default all.
    """
    _refuse_none(runs)
    filled = [fill(key, runs, recipe) for key in dict.fromkeys(keys)]
    tests = [paper.tests(each, against) for each in filled if each.entries] if against else []
    tables = [paper.table(each) for each in filled]
    name = "tables" if len(filled) > 1 else f"table-{filled[0].layout.key}"
    return _files((name, f"{name}-tests"), tables, tests, lambda: page(runs, [*tables, *tests]), forms)


def tests_of(comparisons: Sequence[Comparison], against: str | None) -> list[Table]:
    """Return the tests of each comparison against one of its rows, if one is given."""
    return [significance.tests(each, against) for each in comparisons] if against else []


def write(runs: Sequence[Run], folder: str | Path) -> list[Path]:
    """Write report.md, .csv, .tex and .html and the main figures, each atomically."""
    return write_texts(texts(runs), folder)


def _refuse_none(runs: Sequence[Run]) -> None:
    if not runs:
        raise CofimaError("there are no runs to report")


def _files(
    names: tuple[str, str],
    tables: Sequence[Table],
    tests: Sequence[Table],
    whole: Callable[[], str],
    forms: Collection[str],
) -> dict[str, str]:
    name, tests_name = names
    makers: dict[str, Callable[[], str]] = {
        f"{name}.md": lambda: markdown([*tables, *tests]),
        f"{name}.csv": lambda: csv_text(tables),
        f"{name}.tex": lambda: latex([*tables, *tests]),
        f"{name}.html": whole,
    }
    if tests:  # concatenated, since their columns may differ
        makers[f"{tests_name}.csv"] = lambda: "".join(csv_text([test]) for test in tests)
    return {file: make() for file, make in makers.items() if not forms or file.rpartition(".")[2] in forms}
