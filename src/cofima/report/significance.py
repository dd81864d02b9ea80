"""Paired t-tests of methods over common seeds, corrected for multiple testing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cofima.core.errors import CofimaError, did_you_mean
from cofima.report.comparison import MEASURES, Comparison
from cofima.report.table import MISSING, Cell, Column, Row, Table

Seeds = Mapping[int, float]  # one number per seed
BEST = "best"


@dataclass(frozen=True)
class Test:
    """Mean difference over ``n`` common seeds and its two-sided p-value; None with a reason if not tested."""

    n: int
    difference: float | None
    p: float | None
    reason: str = ""


def paired(mine: Seeds, other: Seeds) -> Test:
    """Test if the mean difference over common seeds is 0 (Student's paired t-test, two-sided)."""
    from scipy.stats import ttest_rel  # takes a second to import

    seeds = sorted(mine.keys() & other.keys())
    differences = [mine[seed] - other[seed] for seed in seeds]
    if not seeds:
        return Test(0, None, None, "no common seed")
    mean = math.fsum(differences) / len(seeds)
    if len(seeds) < 2:
        return Test(len(seeds), mean, None, "one common seed: a spread needs two")
    if max(differences) - min(differences) < 1e-9:
        return Test(len(seeds), mean, None, "the same difference at every seed: there is no spread")
    found = ttest_rel([mine[seed] for seed in seeds], [other[seed] for seed in seeds])
    return Test(len(seeds), mean, float(found.pvalue))


def holm(values: Sequence[float]) -> list[float]:
    """Return the corrected p-values of one family of tests (Holm, 1979), in the given order."""
    order = sorted(range(len(values)), key=lambda at: values[at])
    corrected, least = [0.0] * len(values), 0.0
    for rank, at in enumerate(order):
        least = max(least, min(1.0, (len(values) - rank) * values[at]))
        corrected[at] = least
    return corrected


def against(rows: Mapping[str, Seeds], reference: str) -> dict[str, Test]:
    """Test all rows against one of them; p-values are corrected for multiple testing."""
    found = {name: paired(seeds, rows[reference]) for name, seeds in rows.items() if name != reference}
    tested = [name for name, test in found.items() if test.p is not None]
    raw = [p for name in tested if (p := found[name].p) is not None]
    for name, value in zip(tested, holm(raw), strict=True):
        found[name] = replace(found[name], p=value)
    return found


def tests(comparison: Comparison, reference: str) -> Table:
    """Test the finished rows of a table against one of them, without upper bounds."""
    groups = [group for group in comparison.groups if group.finished and not group.all_at_once]
    rows = {
        group.label: {
            measure.title: {
                int(run.seed): value for run in group.runs if (value := measure.of(run)) is not None
            }
            for measure in MEASURES
            if measure.percent
        }
        for group in groups
    }
    known = {group.label: group.runs[0].method for group in groups}
    return table_of_tests(comparison.table.title, rows, known, reference)


def table_of_tests(
    title: str, rows: Mapping[str, Mapping[str, Seeds]], known: Mapping[str, str], reference: str
) -> Table:
    """Test all rows of a table against one of them, or against the best of each column.

    Args:
        title: Title of the table of runs.
        rows: One number per seed, by label and column.
        known: The method of each label.
        reference: A label, a method that has one row, or ``best``: the row with the largest mean.
    """
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    chosen = reference if reference == BEST else _chosen(reference, known)
    texts = {label: [label] for label in rows}
    reasons: dict[str, None] = {}
    for column in columns:
        here = {label: row[column] for label, row in rows.items() if row.get(column)}
        mark = max(here, key=lambda label: _mean(here[label])) if chosen == BEST and here else chosen
        found = against(here, mark) if mark in here else {}
        for label, cells in texts.items():
            cells.append("reference" if label == mark and label in here else _text(found.get(label), reasons))
    note = (
        f"Mean difference to {'the best of each column' if chosen == BEST else chosen} over common seeds, "
        "p of Student's paired t-test (two-sided, corrected by Holm within each column), in brackets the "
        "number of seeds."
    )
    why = f" No test: {'; '.join(reasons)}." if reasons else ""
    title = f"Tests: {title}"
    return Table(
        title,
        [Column("Method", "left"), *map(Column, columns)],
        [Row([Cell(text) for text in row]) for row in texts.values()],
        note + why,
        records=[
            {"title": title} | dict(zip(["Method", *columns], row, strict=True)) for row in texts.values()
        ],
        scaled=True,
    )


def _chosen(reference: str, known: Mapping[str, str]) -> str:
    labels = [label for label, method in known.items() if reference in (label, method)]
    if len(labels) == 1:
        return labels[0]
    if labels:
        raise CofimaError(f"--against {reference}: several rows are; give one of: {', '.join(labels)}")
    names = [BEST, *known, *known.values()]
    raise CofimaError(f"--against {reference}: no such row{did_you_mean(reference, names)}")


def _mean(seeds: Seeds) -> float:
    return math.fsum(seeds.values()) / len(seeds)


def _text(test: Test | None, reasons: dict[str, None]) -> str:
    if test is None or test.difference is None:
        return MISSING
    if test.p is None:
        reasons[test.reason] = None
        return f"{test.difference:+.2f} ({test.n})"
    p = "p < 0.001" if test.p < 0.001 else f"p = {test.p:.3f}"
    return f"{test.difference:+.2f}, {p} ({test.n})"
