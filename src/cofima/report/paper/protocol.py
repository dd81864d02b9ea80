"""Assignment of runs to the paper's tables, with the reasons why other runs do not follow its protocol."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cofima.core.settings import flat
from cofima.report import metrics
from cofima.report.comparison import MEASURES
from cofima.report.groups import comparable, compared, differences
from cofima.report.metrics import Summary
from cofima.report.paper.layouts import DATASETS, IN_THE_PAPER, LAYOUTS, Layout, Line
from cofima.report.paper.published import is_backbone, published
from cofima.report.runs import Run

Recipe = Callable[[str, str, str], Mapping[str, Any]]
"""Function that returns the paper's settings for a dataset, a backbone and a method; without ``options`` for
a method that is not in the package."""

ColumnKey = tuple[str, str]  # name of a dataset in the registry, and a metric


@dataclass(frozen=True)
class Placed:
    """A run that belongs in a table, with its line and the settings that differ from the recipe."""

    run: Run
    line: Line
    settings: tuple[str, ...]


@dataclass(frozen=True)
class TableEntry:
    """Our runs for one line of a table and one set of settings: one run per seed and dataset."""

    line: Line
    label: str
    lam: str
    runs: dict[str, list[Run]]  # by dataset

    def values(self, column: ColumnKey) -> dict[int, float]:
        """Return the value of each seed."""
        dataset, metric = column
        measure = next(measure for measure in MEASURES if measure.title == metric)
        found = {run.seed: measure.of(run) for run in self.runs.get(dataset, [])}
        return {seed: value for seed, value in found.items() if value is not None}

    def summary(self, column: ColumnKey) -> Summary | None:
        """Return mean and standard deviation over the seeds."""
        values = list(self.values(column).values())
        return metrics.summarize(values) if values else None


@dataclass(frozen=True)
class FilledTable:
    """A table of the paper with our entries, and the runs that do not belong in it."""

    layout: Layout
    entries: list[TableEntry]
    apart: list[tuple[Run, list[str]]]  # runs with another protocol, with the reasons
    elsewhere: int  # number of runs whose method is in another table
    repeats: int  # number of runs of a seed that is already in the table

    @property
    def columns(self) -> list[ColumnKey]:
        """Columns of numbers, in the order of the paper."""
        return [(dataset, metric) for dataset in self.layout.datasets for metric in self.layout.metrics]


def fill(key: str, runs: Iterable[Run], recipe: Recipe) -> FilledTable:
    """Assign runs to a table of the paper; runs with another protocol are listed apart, with the reasons."""
    layout = LAYOUTS[key]
    placed: list[Placed] = []
    apart: list[tuple[Run, list[str]]] = []
    elsewhere = 0
    for run in runs:
        found = place(run, layout, recipe)
        if isinstance(found, Placed):
            placed.append(found)
        elif found is None:
            elsewhere += 1
        else:
            apart.append((run, found))
    entries, repeats = _entries(_one_protocol(placed, apart), layout)
    return FilledTable(layout, entries, apart, elsewhere, repeats)


def place(run: Run, layout: Layout, recipe: Recipe) -> Placed | list[str] | None:
    """Return a run's place in a table, or the reasons against it; None if its method is in another table."""
    dataset = _dataset(run)
    wrong = [] if run.finished else [f"not finished: {run.state}"]
    if dataset not in layout.datasets:
        listed = ", ".join(DATASETS[d] for d in layout.datasets)
        wrong.append(f"dataset {run.dataset}: the table has {listed}")
    aliases = list(dict.fromkeys(line.backbone for line in layout.lines))
    backbone = next((alias for alias in aliases if is_backbone(run.config["backbone"], alias)), None)
    if backbone is None:
        wrong.append(f"backbone {run.backbone}: the table has {', '.join(aliases)}")
    if wrong or backbone is None:
        return wrong
    line = _line(run, backbone, layout)
    if line is None and run.method in IN_THE_PAPER:
        return None
    line = line or Line(run.method, run.label, not run.record.method.keeps_images, backbone, block=9)
    deviations = _deviations(run, flat(recipe(dataset, backbone, run.method)))
    free = {key: text for key, text in deviations.items() if key.startswith(layout.free)}
    settings = tuple(s for s in free.values() if s.partition("=")[0] not in dict(line.options))
    wrong = [text for key, text in deviations.items() if key not in free] + _images(run, dataset)
    if run.config["model"]["pretrained"] is not line.pretrained:
        wrong.append("the backbone is not pre-trained" if line.pretrained else "the backbone is pre-trained")
    return wrong or Placed(run, line, settings)


def _line(run: Run, backbone: str, layout: Layout) -> Line | None:
    """Return the line that matches the run's method, options and initialization."""
    mine = [line for line in layout.lines if line.method == run.method and line.backbone == backbone]
    mine = [line for line in mine if all(run.config["options"].get(k) == v for k, v in line.options)]
    pretrained = run.config["model"]["pretrained"]
    return next((line for line in mine if line.pretrained is pretrained), mine[0] if mine else None)


def _deviations(run: Run, recipe: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that differ from the recipe, each as it is displayed."""
    mine = compared(run.config)
    del mine["model.pretrained"]  # a property of the line
    if mine["stream.order_seed"] == str(run.seed):  # the same order by another name
        del mine["stream.order_seed"]
    return {
        key: f"{key.removeprefix('options.')}={mine[key]}"
        + ("" if key.startswith("options.") else f" (the recipe has {recipe.get(key, 'none')})")
        for key in sorted(mine)
        if mine[key] != recipe.get(key) and not (run.all_at_once and key.startswith("stream."))
    }


def _images(run: Run, dataset: str) -> list[str]:
    """Return differences from the table in the images or their preprocessing."""
    facts, known = run.record.data, published().images[DATASETS[dataset]]
    found, preset = (facts.get("train"), facts.get("test")), run.record.preprocess.get("preset", "timm")
    wrong = []
    if found not in known:
        shown = " or ".join(f"{train:,} + {test:,}" for train, test in known)
        wrong.append(f"images {found[0]} + {found[1]}: the table has {shown}")
    if preset != "slca":
        wrong.append(f"preset {preset}: the table has slca")
    return wrong


def _one_protocol(placed: Sequence[Placed], apart: list[tuple[Run, list[str]]]) -> list[Placed]:
    """Keep the largest set of comparable runs per dataset and backbone; move the others to ``apart``."""
    kept: list[Placed] = []
    columns = dict.fromkeys((_dataset(each.run), each.line.backbone, each.line.pretrained) for each in placed)
    for column in columns:
        here = [p for p in placed if (_dataset(p.run), p.line.backbone, p.line.pretrained) == column]
        sets = comparable([p.run for p in here], _differ)
        most = max(sets, key=len)
        for each in here:
            if any(run is each.run for run in most):
                kept.append(each)
            else:
                why = next(found for run in most if (found := _differ(each.run, run)))
                apart.append((each.run, [f"not the protocol of most runs: {line}" for line in why]))
    return kept


def _differ(a: Run, b: Run) -> list[str]:
    """Return the reasons why two runs cannot be in one column.

    The final norm depends on the method's recipe, which was checked before. It also changes the hash of the
    weights, so the hash is only compared between runs with the same final norm.
    """
    one, two = (run.record.backbone.get("final_norm", "pretrained") for run in (a, b))
    return differences(a, b, free=("backbone", "final_norm") if one != two else ())


def _entries(placed: Sequence[Placed], layout: Layout) -> tuple[list[TableEntry], int]:
    """Group runs by line and settings, in the order of the paper; other methods follow."""
    order = {line: number for number, line in enumerate(layout.lines)}
    groups: dict[tuple[Line, tuple[str, ...]], list[Run]] = {}
    codes: dict[tuple[Line, tuple[str, ...]], set[str]] = {}
    for each in placed:
        codes.setdefault((each.line, each.settings), set()).add(each.run.code)
    for each in sorted(placed, key=lambda p: (order.get(p.line, len(order)), p.line.name, p.settings)):
        several = len(codes[each.line, each.settings]) > 1  # versions of a plugin are different methods
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
        entries.append(TableEntry(line, label, _lam(runs), by_dataset))
    return entries, repeats


def _lam(runs: Sequence[Run]) -> str:
    """Return the configured share of the new weights, if the method has one."""
    given = {str(lam) for run in runs if (lam := run.config["options"].get("lam")) is not None}
    return ", ".join(sorted(given))


def _dataset(run: Run) -> str:
    return str(run.config["dataset"])
