"""Sweeps of lambda, the share of the new weights: for a recipe, or for one task of a run.

A recipe is run with every share on a part of its training images, and the best is chosen on the held-out
rest. Test images are not used for the choice: tests are separate runs. For a run, one task is merged with
every share without training it again; the steps after the merge are the method's: batch normalization,
statistics of the new classes and the alignment of the head. At the run's own share, the weights are
bit-identical to those of the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Literal

from cofima import methods
from cofima.analysis.cells import configure, incremental, last, learn, recipe_methods
from cofima.analysis.evaluate_at import NAMES, PARTS, Measurement, measure
from cofima.analysis.output import Result
from cofima.analysis.relearn import Relearned, averaging, relearn
from cofima.analysis.run_folder import choose_task, open_run
from cofima.core.errors import problems
from cofima.core.progress import SILENT, Progress
from cofima.report.drawing import Curve, curves
from cofima.report.metrics import summarize
from cofima.report.runs import Run
from cofima.store.config import Config

TAKEN = ("method", "options.lam", "val_fraction", "seed")
Tested = Literal["chosen", "all", "none"]
Key = tuple[str, float, int]


@dataclass(frozen=True)
class Sweep:
    """Values to sweep over, and the selection criterion."""

    names: Sequence[str]
    shares: Sequence[float] = tuple(k / 10 for k in range(11))
    seeds: Sequence[int] = ()
    val_fraction: float = 0.2
    by: Literal["last", "inc"] = "last"
    tested: Tested = "chosen"

    def check(self) -> None:
        """Raise with all methods that have no lam, and all values out of range."""
        wrong = [f"--methods {name}: it has no option lam" for name in self.names if not _has_share(name)]
        wrong += [f"--lams {lam}: must lie between 0 and 1" for lam in self.shares if not 0 <= lam <= 1]
        if not 0 < self.val_fraction < 1:
            wrong.append(f"--val-fraction {self.val_fraction}: must lie between 0 and 1")
        if wrong:
            raise problems("the sweep of lam", wrong)


@dataclass
class Outcome:
    """Runs by method, share and seed: on held-out images, and those on test images, if any."""

    held_out: dict[Key, Run]
    test: dict[Key, Run] = field(default_factory=dict)
    chosen: dict[str, float] = field(default_factory=dict)


def sweep(
    recipe: str, overrides: Sequence[str], how: Sweep, out: Path, jobs: int = 1, progress: Progress = SILENT
) -> Result:
    """Run with every share on a part of the training images, choose the best, and run the tests."""
    how = how if how.names else replace(how, names=recipe_methods("lambda.yaml"))
    how.check()
    seeds = how.seeds or [configure(recipe, overrides, [()], TAKEN)[0].seed]
    keys = list(product(how.names, sorted(set(how.shares)), seeds))

    def runs(wanted: Sequence[Key], share: float) -> dict[Key, Run]:
        made = learn(_cells(recipe, overrides, wanted, share), out / "cells", jobs, progress)
        return dict(zip(wanted, made, strict=True))

    _cells(recipe, overrides, keys, 0.0)  # raises for invalid cells before any is run
    found = Outcome(runs(keys, how.val_fraction))
    found.chosen = choose(found.held_out, how.by)
    tested = [key for key in keys if how.tested == "all" or key[1] == found.chosen[key[0]]]
    found.test = {} if how.tested == "none" else runs(tested, 0.0)
    said = [_said(name, lam, found, how.by) for name, lam in found.chosen.items()]
    return Result("lambda", _rows(found), {"lambda": _draw(found, how.by)}, said)


def choose(runs: Mapping[Key, Run], by: str) -> dict[str, float]:
    """Return each method's best share by its mean over seeds; of equal ones, the smallest."""
    best: dict[str, float] = {}
    for name in dict.fromkeys(name for name, _, _ in runs):
        means = {lam: mean for lam, mean, _ in _curve(runs, name, by)}
        best[name] = max(means, key=lambda lam: (means[lam], -lam))
    return best


def _has_share(name: str) -> bool:
    return "lam" in methods.find(name).__dataclass_fields__


def _cells(recipe: str, overrides: Sequence[str], keys: Sequence[Key], val_fraction: float) -> list[Config]:
    cells = [
        [f"method={name}", f"options.lam={lam}", f"seed={seed}", f"val_fraction={val_fraction}"]
        for name, lam, seed in keys
    ]
    return configure(recipe, overrides, cells, TAKEN)


def _curve(runs: Mapping[Key, Run], name: str, by: str) -> list[tuple[float, float, float]]:
    """Return share, mean and standard deviation over seeds, in order of the shares."""
    value = last if by == "last" else incremental
    found = []
    for lam in sorted({lam for other, lam, _ in runs if other == name}):
        some = [value(run) for (other, at, _), run in runs.items() if (other, at) == (name, lam)]
        over = summarize(some)
        found.append((lam, over.mean, over.std or 0.0))
    return found


def _draw(found: Outcome, by: str) -> str:
    drawn = []
    for place, (name, lam) in enumerate(found.chosen.items()):
        label = methods.find(name).label
        for runs, what in ((found.held_out, "held out"), (found.test, "test")):
            points = _curve(runs, name, by)
            if not points:
                continue
            x, y, spread = (list(column) for column in zip(*points, strict=True))
            best = x.index(lam) if runs is found.held_out else None
            drawn.append(Curve(f"{label}, {what}", x, y, spread, best, what == "test", place))
    up = "Last accuracy (%)" if by == "last" else "Mean accuracy over tasks (%)"
    return curves(drawn, "λ, share of the new weights", up)


def _said(name: str, lam: float, found: Outcome, by: str) -> str:
    def at(runs: Mapping[Key, Run]) -> float | None:
        return next((mean for share, mean, _ in _curve(runs, name, by) if share == lam), None)

    test = at(found.test)
    shown = "" if test is None else f", {test:.2f} % on test images"
    return f"{name}: λ = {lam:g}, chosen by {at(found.held_out):.2f} % on held-out training images{shown}"


def _rows(found: Outcome) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for (name, lam, seed), run in found.held_out.items():
        test = found.test.get((name, lam, seed))
        rows.append(
            {
                "method": name,
                "lam": lam,
                "seed": seed,
                "chosen": lam == found.chosen[name],
                "held_out_last": last(run),
                "held_out_inc": incremental(run),
                "test_last": "" if test is None else last(test),
                "test_inc": "" if test is None else incremental(test),
            }
        )
    return rows


def posthoc(
    folder: Path, shares: Sequence[float], task: int | None = None, progress: Progress = SILENT
) -> Result:
    """Merge a task with every share, including the run's own, and measure each."""
    run = open_run(folder)
    averaging(run.method, folder)
    learned = relearn(run, choose_task(run, task), progress)
    own = learned.lam
    every = sorted({*shares, *([] if own is None else [own])})
    found = [merge_and_measure(learned, lam) for lam in progress.track(every, len(every), "lam")]
    drawn = [Curve(NAMES[part], every, [m.mean("accuracy", part) for m in found]) for part in PARTS]
    title = f"{run.label}, task {learned.task.index + 1}: λ after the training"
    figure = curves(drawn, "λ, share of the trained weights", "Accuracy (%)", title, mark=own)
    said = [f"λ of the run: {own:g}"] if own is not None else []
    images = "held-out training images" if run.config.val_fraction else "test images: do not choose λ by them"
    said.append(f"measured on {images}")
    rows = [
        learned.columns() | {"lam": lam, "of_run": lam == own} | point.columns()
        for lam, point in zip(every, found, strict=True)
    ]
    return Result("lambda_posthoc", rows, {"lambda_posthoc": figure}, said)


def merge_and_measure(task: Relearned, lam: float) -> Measurement:
    """Merge with one share, and measure the predictions of the method."""
    model = task.merge_again(lam)
    model.method.net.eval()
    return measure(model.method.predict, task.seen, model.method.context)
