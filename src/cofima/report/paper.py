"""The tables of the paper with our runs in them: ours above, what is published below, nothing mixed."""

from collections.abc import Sequence
from dataclasses import dataclass

from cofima.report import metrics
from cofima.report.groups import comparable, differences
from cofima.report.layouts import DATASETS, LAYOUTS, Layout, Line
from cofima.report.metrics import Summary
from cofima.report.protocol import Placed, place
from cofima.report.runs import Run

Column = tuple[str, str]  # a dataset, by the name that we have for it, and a metric


@dataclass(frozen=True)
class Entry:
    """Our runs on one line of a table, with one set of settings, one run a seed and dataset."""

    line: Line
    label: str
    lam: str
    runs: dict[str, list[Run]]  # by dataset

    def values(self, column: Column) -> dict[int, float]:
        """Return the number of each seed."""
        dataset, metric = column
        found = {int(run.seed): _measure(run, metric) for run in self.runs.get(dataset, [])}
        return {seed: value for seed, value in found.items() if value is not None}

    def summary(self, column: Column) -> Summary | None:
        """Return mean and standard deviation over the seeds."""
        values = list(self.values(column).values())
        return metrics.summarise(values) if values else None


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper, our entries in it, and the runs that may not stand in it."""

    layout: Layout
    entries: list[Entry]
    apart: list[tuple[Run, list[str]]]  # with what forbids it
    elsewhere: int  # runs of methods that have their line in another table
    repeats: int  # runs of a seed that is already there

    @property
    def columns(self) -> list[Column]:
        """Return the columns of numbers, in the order of the paper."""
        return [(dataset, metric) for dataset in self.layout.datasets for metric in self.layout.metrics]


def fill(key: str, runs: Sequence[Run]) -> PaperTable:
    """Put runs into a table of the paper; those that do not follow its protocol stand apart, with why."""
    layout = LAYOUTS[key]
    placed: list[Placed] = []
    apart: list[tuple[Run, list[str]]] = []
    elsewhere = 0
    for run in runs:
        found = place(run, layout)
        if isinstance(found, Placed):
            placed.append(found)
        elif found is None:
            elsewhere += 1
        else:
            apart.append((run, found))
    kept = _one_protocol(placed, apart)
    entries, repeats = _entries(kept, layout)
    return PaperTable(layout, entries, apart, elsewhere, repeats)


def _measure(run: Run, metric: str) -> float | None:
    if metric == "Last-Acc":
        return metrics.last(run.matrix, run.sizes)
    return None if run.joint else metrics.incremental(run.matrix, run.sizes)


def _one_protocol(placed: Sequence[Placed], apart: list[tuple[Run, list[str]]]) -> list[Placed]:
    """Keep, for each dataset and backbone, the largest set of runs that compare; move the others apart."""
    kept: list[Placed] = []
    columns = dict.fromkeys((_dataset(each.run), each.line.backbone, each.line.pretrained) for each in placed)
    for column in columns:
        here = [p for p in placed if (_dataset(p.run), p.line.backbone, p.line.pretrained) == column]
        sets = comparable([p.run for p in here])
        most = max(sets, key=len)
        for each in here:
            if any(run is each.run for run in most):
                kept.append(each)
            else:
                why = next(found for run in most if (found := differences(each.run, run)))
                apart.append((each.run, [f"not the protocol of most runs: {line}" for line in why]))
    return kept


def _entries(placed: Sequence[Placed], layout: Layout) -> tuple[list[Entry], int]:
    """Join runs of one line and one set of settings, in the order of the paper; other methods follow."""
    order = {line: number for number, line in enumerate(layout.lines)}
    groups: dict[tuple[Line, tuple[str, ...]], list[Run]] = {}
    codes: dict[tuple[Line, tuple[str, ...]], set[str]] = {}
    for each in placed:
        codes.setdefault((each.line, each.settings), set()).add(each.run.code)
    for each in sorted(placed, key=lambda p: (order.get(p.line, len(order)), p.line.name, p.settings)):
        several = len(codes[each.line, each.settings]) > 1  # versions of a plugin are not one method
        settings = (*each.settings, *([f"plugin={each.run.code}"] if several else []))
        groups.setdefault((each.line, settings), []).append(each.run)
    entries, repeats = [], 0
    for (line, settings), runs in groups.items():
        by_dataset: dict[str, list[Run]] = {}
        for run in sorted(runs, key=lambda run: (str(run.seed), str(run.folder))):
            same = by_dataset.setdefault(_dataset(run), [])
            if any(run.seed == other.seed for other in same):
                repeats += 1
            else:
                same.append(run)
        label = f"{line.name} ({', '.join(settings)})" if settings else line.name
        entries.append(Entry(line, label, _lam(runs), by_dataset))
    return entries, repeats


def _lam(runs: Sequence[Run]) -> str:
    """Return the share of the new weights that runs were given, where the method has one."""
    given = {str(lam) for run in runs if (lam := (run.config.get("options") or {}).get("lam")) is not None}
    return ", ".join(sorted(given))


def _dataset(run: Run) -> str:
    return str(run.config["dataset"])


def name_of(column: Column) -> str:
    """Return a column's name in the paper."""
    return f"{DATASETS[column[0]]} {column[1]}"
