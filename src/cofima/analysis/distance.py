r"""Distances between the weights of a run after each task: :math:`\lVert \theta^*_s - \theta^*_t \rVert_2`.

Distances are over the backbone's parameters; state 0 is the backbone before the first task.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from cofima.analysis.output import Result
from cofima.analysis.plots import matrices
from cofima.analysis.run_folder import RunFolder, by_layer, open_run
from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT, Progress
from cofima.report.drawing import Curve, curves
from cofima.report.paper.published import TextNumber, text_number
from cofima.weights.distance import weight_distance

ALL = "all"
Distances = dict[str, list[list[float]]]  # per layer: distances between the states after 0, 1, ... tasks


def distance(folders: Sequence[Path], progress: Progress = SILENT) -> Result:
    """Measure the distances between all states of runs, and draw one matrix per run."""
    runs = open_all(folders)
    found = [measure_distances(run, progress) for run in runs]
    named = dict(zip(labels(runs), found, strict=True))
    layers = list(found[0])[1:]
    moved = [
        Curve(label, range(len(layers)), [each[name][0][-1] for name in layers])
        for label, each in named.items()
        if list(each)[1:] == layers  # another architecture has other layers
    ]
    whole = {label: each[ALL] for label, each in named.items()}
    printed = {label: _printed(run) for label, run in zip(named, runs, strict=True)}
    titled = {
        f"{label} (printed: {known.value:g})" if (known := printed[label]) else label: matrix
        for label, matrix in whole.items()
    }
    figures = {
        "distance": matrices(titled, "State after task", "Distance between weights"),
        "distance_layers": curves(moved, "", "Distance from the start", "After the last task", ticks=layers),
    }
    said = [
        f"{label}: {matrix[0][-1]:.4g} from the start, {matrix[1][-1]:.4g} from the first task"
        for label, matrix in whole.items()
    ]
    said += [
        f"{label}: {known.value:g} in the paper ({known.source})" for label, known in printed.items() if known
    ]
    rows = [row for run, each in zip(runs, found, strict=True) for row in _rows(run, each)]
    return Result("distance", rows, figures, said)


def _printed(run: RunFolder) -> TextNumber | None:
    """Return the paper's number for the method, dataset and backbone of a run."""
    config = run.config
    return text_number("distance", config.method, config.dataset, config.backbone)


def measure_distances(run: RunFolder, progress: Progress = SILENT) -> Distances:
    """Measure all pairs of states, over all weights and per layer; only two states are in memory."""
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
    return found


def open_all(folders: Sequence[Path]) -> list[RunFolder]:
    """Open all runs; raise with all their problems before anything is measured."""
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
    """Return labels of runs: their methods, the names of their folders if methods repeat, or their paths."""
    names = [run.label for run in runs], [run.folder.name for run in runs]
    return next((found for found in names if len(set(found)) == len(runs)), [str(run.folder) for run in runs])


def _rows(run: RunFolder, found: Distances) -> list[dict[str, object]]:
    return [
        {
            "run": str(run.folder),
            "method": run.config.method,
            "layer": name,
            "after": s,
            "and_after": t,
            "distance": distance,
        }
        for name, matrix in found.items()
        for s, row in enumerate(matrix)
        for t, distance in enumerate(row)
    ]
