"""Runs of an analysis, as cells of a grid: the same command resumes after an interruption."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from cofima.core.errors import CofimaError, problems
from cofima.core.progress import Progress
from cofima.experiment.config import read_values, resolve
from cofima.experiment.grid.cells import name
from cofima.experiment.grid.scheduler import run_grid
from cofima.report import metrics
from cofima.report.runs import Run, read
from cofima.store.config import Config


def configure(
    recipe: str, overrides: Sequence[str], cells: Iterable[Sequence[str]], taken: Sequence[str]
) -> list[Config]:
    """Return a configuration per cell: the recipe, then the user's overrides, then the cell's items.

    Overrides of keys that the analysis sets itself (``taken``) are refused; one error lists all problems.
    """
    wrong = [f"{item}: this is set by the analysis" for item in overrides if item.partition("=")[0] in taken]
    if wrong:
        raise problems("the command line", wrong)
    values = read_values(recipe)
    values.pop("grid", None)
    found = []
    for cell in cells:
        try:
            found.append(resolve(values, [*overrides, *cell], f"{recipe} with {' '.join(cell)}"))
        except CofimaError as error:
            wrong.append(str(error))
    if wrong:
        raise CofimaError("\n".join(dict.fromkeys(wrong)))
    return found


def recipe_methods(recipe: str) -> list[str]:
    """Return the methods in the grid of a packaged recipe."""
    grid = read_values(recipe)["grid"]
    return list((grid if isinstance(grid, list) else [grid])[0]["method"])


def learn(cells: Sequence[Config], out: Path, jobs: int, progress: Progress) -> list[Run]:
    """Run every cell below ``out``; return the runs in order, or raise if one failed."""
    outcome = run_grid(list({name(cell): cell for cell in cells}.values()), out, jobs, progress)
    if outcome.failed:
        lines = [f"{folder}: {fault}" for folder, fault in outcome.failed.items()]
        raise problems(
            "the grid of this analysis", [*lines, "the same command continues with the missing cells"]
        )
    return [read(out / name(cell)) for cell in cells]


def last(run: Run) -> float:
    """Return the accuracy over all classes after the last task (%)."""
    return metrics.last(run.matrix, run.sizes)


def incremental(run: Run) -> float:
    """Return the accuracy over the classes seen, averaged over tasks (%)."""
    return metrics.incremental(run.matrix, run.sizes)
