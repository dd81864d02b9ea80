r"""Distances between the weights of a run after each task: :math:`\lVert \theta^*_s - \theta^*_t \rVert_2`.

Over the backbone's parameters; state 0 is the backbone before the first task.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cofima.analysis.output import Result
from cofima.analysis.plots import Curve, Matrix, curves, matrices
from cofima.analysis.run_folder import RunFolder, by_layer, open_run
from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT, Progress
from cofima.weights.distance import weight_distance

ALL = "all"


@dataclass(frozen=True)
class Distances:
    """Distances between the states after 0, 1, ... tasks, over all weights and over each layer's."""

    run: RunFolder
    layers: dict[str, list[list[float]]]

    @property
    def matrix(self) -> list[list[float]]:
        """Return the distances over all weights."""
        return self.layers[ALL]


def distance(folders: Sequence[Path], progress: Progress = SILENT) -> Result:
    """Measure the distances between all states of runs, and draw one matrix per run."""
    found = [measure_distances(run, progress) for run in open_all(folders)]
    names = labels([each.run for each in found])
    drawn = [Matrix(label, each.matrix) for label, each in zip(names, found, strict=True)]
    first = list(found[0].layers)[1:]
    moved = [
        Curve(label, range(len(first)), [each.layers[name][0][-1] for name in first])
        for label, each in zip(names, found, strict=True)
        if list(each.layers)[1:] == first  # another architecture has other layers
    ]
    figures = {
        "distance": matrices(drawn, "State after task", "Distance between weights"),
        "distance_layers": curves(moved, "", "Distance from the start", "After the last task", ticks=first),
    }
    said = [
        f"{label}: {each.matrix[0][-1]:.4g} from the start, {each.matrix[1][-1]:.4g} from the first task"
        for label, each in zip(names, found, strict=True)
    ]
    rows = [row for each in found for row in _rows(each)]
    return Result("distance", rows, figures, said)


def measure_distances(run: RunFolder, progress: Progress = SILENT) -> Distances:
    """Measure every pair of states once; two of them are in memory at a time."""
    states = range(run.tasks + 1)
    layers = by_layer(run.parameters)
    found = {name: [[0.0] * len(states) for _ in states] for name in (ALL, *layers)}
    for s in progress.track(states, len(states), "states"):
        one = run.backbone(s)
        for t in range(s + 1, len(states)):
            two = run.backbone(t)
            for name, keys in layers.items():
                pair = ({k: weights[k] for k in keys if k in weights} for weights in (one, two))
                found[name][s][t] = found[name][t][s] = weight_distance(*pair)
            whole = math.sqrt(sum(found[name][s][t] ** 2 for name in layers))
            found[ALL][s][t] = found[ALL][t][s] = whole
    return Distances(run, found)


def open_all(folders: Sequence[Path]) -> list[RunFolder]:
    """Open all runs; raise with every problem of any of them before anything is measured."""
    runs, wrong = [], []
    for folder in folders:
        try:
            run = open_run(folder)
            for task in range(1, run.tasks + 1):
                run.generation(task)
            runs.append(run)
        except CofimaError as error:
            wrong.append(str(error))
    if wrong:
        raise CofimaError("\n".join(wrong))
    return runs


def labels(runs: Sequence[RunFolder]) -> list[str]:
    """Name runs by their methods, or by their folders if methods repeat."""
    found = [run.label for run in runs]
    return found if len(set(found)) == len(found) else [run.folder.name for run in runs]


def _rows(found: Distances) -> list[dict[str, object]]:
    states = range(found.run.tasks + 1)
    return [
        {
            "run": str(found.run.folder),
            "method": found.run.config.method,
            "layer": name,
            "after": s,
            "and_after": t,
            "distance": matrix[s][t],
        }
        for name, matrix in found.layers.items()
        for s in states
        for t in states
    ]
