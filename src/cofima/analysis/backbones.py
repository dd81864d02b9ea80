"""Comparisons of backbones, and of pre-trained weights with training from scratch."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from cofima import methods
from cofima.analysis.cells import configure, incremental, last, learn, recipe_methods
from cofima.analysis.output import Result
from cofima.analysis.plots import Bars, bars
from cofima.core.errors import CofimaError, problems
from cofima.core.progress import SILENT, Progress
from cofima.report.groups import grouped
from cofima.report.metrics import summarize
from cofima.report.paper.published import TextNumber, text_number
from cofima.report.runs import Run, find

Place = tuple[str, str]  # a group of bars, and a bar in it
Table = Mapping[Place, Sequence[Run]]


def backbones(folders: Sequence[Path]) -> Result:
    """Compare finished runs of the same tasks on different backbones, per method."""
    runs = find(folders)
    _refuse_mixture(runs)
    table: dict[tuple[str, str], list[Run]] = {}
    for name in dict.fromkeys(run.backbone for run in runs):
        for row in grouped([run for run in runs if run.backbone == name]):
            table[name, row.label] = row.runs
    if len({name for name, _ in table}) < 2:
        raise CofimaError(f"all of these runs have the backbone {runs[0].backbone}: give runs of another too")
    return _result("backbones", "backbone", table, {key: _printed(some[0]) for key, some in table.items()})


def learn_backbones(
    recipe: str,
    overrides: Sequence[str],
    names: Sequence[str],
    with_methods: Sequence[str],
    out: Path,
    jobs: int = 1,
    progress: Progress = SILENT,
) -> Result:
    """Run a recipe with every method on every backbone, and compare them.

    ``with_methods`` defaults to those of the recipe ``backbones.yaml``.
    """
    with_methods = with_methods or recipe_methods("backbones.yaml")
    cells = [[f"backbone={name}", f"method={method}"] for name, method in product(names, with_methods)]
    configs = configure(recipe, overrides, cells, ("backbone", "method"))
    return backbones([run.folder for run in learn(configs, out / "cells", jobs, progress)])


def scratch(
    recipe: str,
    overrides: Sequence[str],
    with_methods: Sequence[str],
    own: Sequence[str],
    out: Path,
    jobs: int = 1,
    progress: Progress = SILENT,
) -> Result:
    """Run a recipe with pre-trained weights and from scratch, and compare them per method.

    ``own`` are settings for a third column: training from scratch needs other learning rates than
    fine-tuning, and without them the comparison says more about learning rates than about pre-training.
    ``with_methods`` defaults to those of the recipe ``scratch.yaml``.
    """
    with_methods = with_methods or recipe_methods("scratch.yaml")
    fresh = ["model.pretrained=false", "model.checkpoint=null"]
    kinds = {"pre-trained": ["model.pretrained=true"], "scratch, same settings": fresh}
    if own:
        kinds[f"scratch, {' '.join(own)}"] = [*fresh, *own]
    places = list(product(with_methods, kinds))
    cells = [[f"method={method}", *kinds[kind]] for method, kind in places]
    configs = configure(recipe, overrides, cells, ("method", "model.pretrained"))
    runs = learn(configs, out / "cells", jobs, progress)
    pairs = zip(places, runs, strict=True)
    table = {(methods.find(method).label, kind): [run] for (method, kind), run in pairs}
    return _result("scratch", "method", table)


def _printed(run: Run) -> TextNumber | None:
    """Return the paper's number for a run's method, dataset and backbone."""
    config = run.config
    return text_number("Last-Acc", run.method, config["dataset"], config["backbone"])


def _result(name: str, first: str, table: Table, printed: Mapping[Place, TextNumber | None] = {}) -> Result:
    """Return rows with mean and standard deviation over seeds, and a figure of the last accuracies."""
    second = "method" if first == "backbone" else "start"
    rows: list[dict[str, object]] = []
    for (one, two), runs in table.items():
        final, mean = (summarize([value(run) for run in runs]) for value in (last, incremental))
        rows.append(
            {
                first: one,
                second: two,
                "n": len(runs),
                "seeds": " ".join(str(run.seed) for run in runs),
                "pretraining": runs[0].record.backbone.get("pretraining", ""),
                "last_mean": final.mean,
                "last_std": "" if final.std is None else final.std,
                "inc_mean": mean.mean,
                "inc_std": "" if mean.std is None else mean.std,
                **(
                    {"published_last": known.value if (known := printed[one, two]) else ""} if printed else {}
                ),
            }
        )
    said = [f"{row[first]}, {row[second]}: {row['last_mean']:.2f} % after the last task" for row in rows]
    said += [
        f"{one}, {two}: {known.value:.2f} % in the paper ({known.source})"
        for (one, two), known in printed.items()
        if known
    ]
    values = {key: known.value for key, known in printed.items() if known}
    return Result(name, rows, {name: _draw(table, values)}, said)


def _draw(table: Table, published: Mapping[Place, float]) -> str:
    groups, kinds = (list(dict.fromkeys(key[place] for key in table)) for place in (0, 1))
    found = {key: summarize([last(run) for run in runs]) for key, runs in table.items()}
    drawn = []
    for kind in kinds:
        here = [found.get((group, kind)) for group in groups]
        means = [None if each is None else each.mean for each in here]
        spread = [None if each is None else each.std for each in here]
        drawn.append(Bars(kind, means, spread, [published.get((group, kind)) for group in groups]))
    return bars(groups, drawn, "Last accuracy (%)")


def _refuse_mixture(runs: Sequence[Run]) -> None:
    """Raise for unfinished runs, and for runs on other images or tasks than the first."""
    wrong = [f"{run.folder}: not finished ({run.state})" for run in runs if not run.finished]
    for run in runs[1:]:
        for what, ours, theirs in zip(_WHAT, _protocol(runs[0]), _protocol(run), strict=True):
            if ours != theirs and not (
                what == "number of tasks" and (run.all_at_once or runs[0].all_at_once)
            ):
                wrong.append(f"{run.folder}: another {what} than {runs[0].folder} ({theirs} / {ours})")
    if wrong:
        raise problems("the comparison of backbones", wrong)


_WHAT = ("dataset", "split", "val_fraction and data.max_train_per_class", "number of tasks")


def _protocol(run: Run) -> tuple[object, ...]:
    config = run.config
    most = (config.get("data") or {}).get("max_train_per_class")
    held = (config.get("val_fraction", 0.0), most)
    return run.dataset, run.record.data.get("split_hash"), held, run.planned
