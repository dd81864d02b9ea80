"""A study: cells of a grid, measured once each, kept as JSON lines, and shown as tables.

`desk.py` and `capped.py` are studies. A cell that was measured is not measured again; its line in the study's
file has its configuration and history, so tables can be made anew without running anything.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console

from cofima.cli.console import TerminalProgress
from cofima.experiment.config import check
from cofima.experiment.grid.cells import cells, name
from cofima.experiment.grid.scheduler import run_grid
from cofima.report.groups import Group, comparable, grouped
from cofima.report.metrics import forgetting, incremental, last
from cofima.report.runs import Run, collect, read_study
from cofima.store.model_folder import finished

HERE = Path(__file__).parent
Measure = Callable[[Run], float | None]


def last_accuracy(run: Run) -> float:
    """Return the accuracy over all classes at the end, in percent."""
    return last(run.matrix, run.sizes)


MEASURES: list[tuple[str, int, Measure]] = [
    ("Last-Acc", 1, last_accuracy),
    ("Inc-Acc", 1, lambda run: None if run.all_at_once else incremental(run.matrix, run.sizes)),
    ("Forgetting", 1, lambda run: None if run.all_at_once else forgetting(run.matrix)),
    ("CPU s", 0, lambda run: sum(step.seconds["cpu"] for step in run.history)),
    ("Peak MB", 0, lambda run: max(step.peak_memory_mb or 0 for step in run.history)),
    ("Kept MB", 2, lambda run: (run.history[-1].state_bytes or 0) / 1e6),
]


def arguments(doc: str | None, out: str) -> argparse.ArgumentParser:
    """Return the options that every study has."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time, each on one thread")
    parser.add_argument("--only", action="append", default=[], metavar="KEY=VALUE[,VALUE]")
    parser.add_argument("--collect", action="store_true", help="run nothing; write what is finished")
    return parser


def measured(study: Path) -> set[str]:
    """Return the cells that were measured, by their present names: newer settings at their defaults."""
    return {name(check(run.config)) for run in read_study(study)} if study.is_file() else set()


def measure(recipe: str | Path, study: Path, chosen: argparse.Namespace) -> None:
    """Run the cells of a recipe that were not measured yet, and add what is finished to the study."""
    if not chosen.collect:
        every, done = cells(recipe, [], chosen.only), measured(study)
        todo = [cell for cell in every if name(cell) not in done]
        print(f"{len(every)} cells, {len(every) - len(todo)} of them measured before", flush=True)
        run_grid(todo, chosen.out, chosen.jobs, TerminalProgress(Console()))
    wanted = {name(cell) for cell in cells(recipe)}
    folders = sorted(folder for folder in chosen.out.glob("*") if folder.name in wanted and finished(folder))
    collect(folders, study)


@dataclass(frozen=True)
class Gap:
    """A column of differences in Last-Acc, seed by seed.

    Attributes:
        title: Title of the column.
        base: Tells the group that others are compared with.
        sign: 1 for a row minus the base, -1 for the base minus a row.
    """

    title: str
    base: Callable[[Group], bool]
    sign: int = 1


def compared(
    study: Path, gaps: Sequence[Gap], spread: Callable[[Sequence[float]], float] = stdev
) -> Iterator[tuple[list[Run], list[str]]]:
    """Yield each set of comparable runs with its table, the upper bound first, then from the best down.

    Args:
        study: The file of the study.
        gaps: Columns of differences.
        spread: Of the differences: their standard deviation, or the standard error of their mean.
    """
    for members in comparable(read_study(study)):
        found = sorted(grouped(members), key=lambda row: (not row.all_at_once, -mean(row, last_accuracy)))
        titles = [*(title for title, _, _ in MEASURES), *(gap.title for gap in gaps)]
        lines = [f"| Method | n | {' | '.join(titles)} |", "|---|---|" + "---|" * len(titles)]
        for row in found:
            columns = [shown(values(row, of), f".{digits}f") for _, digits, of in MEASURES]
            columns += [shown(list(_differences(row, found, gap)), "+.1f", spread) for gap in gaps]
            lines.append(f"| {row.label} | {len(row.runs)} | {' | '.join(columns)} |")
        yield members, lines


def _differences(row: Group, others: Sequence[Group], gap: Gap) -> Iterable[float]:
    """Yield the difference of a row's Last-Acc and that of the base, seed by seed."""
    other = next((other for other in others if gap.base(other)), row)
    known = {run.seed: last_accuracy(run) for run in other.runs}
    if row is not other:
        found = ((run, known[run.seed]) for run in row.runs if run.seed in known)
        yield from (gap.sign * (last_accuracy(run) - base) for run, base in found)


def values(row: Group, of: Measure) -> list[float]:
    """Return a measure of every run of a group that has it."""
    return [value for run in row.runs if (value := of(run)) is not None]


def mean(row: Group, of: Measure) -> float:
    """Return the mean of a measure, 0 where no run has it."""
    return fmean(values(row, of) or [0.0])


def shown(numbers: Sequence[float], form: str, spread: Callable[[Sequence[float]], float] = stdev) -> str:
    """Return the mean of numbers with their spread."""
    if not numbers:
        return "–"
    around = f" ± {spread(numbers):{form.removeprefix('+')}}" if len(numbers) > 1 else ""
    return f"{fmean(numbers):{form}}{around}"


def standard_error(numbers: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return stdev(numbers) / len(numbers) ** 0.5
