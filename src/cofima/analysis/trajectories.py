r"""Trajectories of several runs from one start, in the plane of their first two principal components.

The paper's Fig. 2 compares tasks that start at :math:`\theta_0`, averages with :math:`\lambda = 1/t`, and
averages with a constant :math:`\lambda`. A run keeps only :math:`\theta^*_t`; the weights
:math:`\theta_t` before each merge are recovered by re-running the tasks. (Dividing the step by
:math:`\lambda` would recover them for CoMA only: with Fisher information every weight has its own share.)
The background is the accuracy of class means at each point, since runs have different heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from cofima.analysis.distance import labels, open_all
from cofima.analysis.evaluate_at import fewer, measure
from cofima.analysis.landscape import axis
from cofima.analysis.output import Result
from cofima.analysis.plane import Plane, principal
from cofima.analysis.plots import Spot, Surface, Trail, plane
from cofima.analysis.relearn import load_tasks, relearn
from cofima.analysis.run_folder import RunFolder
from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT, Progress
from cofima.data.image_set import join
from cofima.data.stream import Stream
from cofima.methods.components.aligned import Aligned
from cofima.methods.state import untagged
from cofima.models.backbone import build_like
from cofima.training.context import Context
from cofima.training.loop import batchnorm_layers, plain_batches
from cofima.weights.ops import Weights

XY = tuple[float, float]


@dataclass(frozen=True)
class Trajectory:
    """One run in the plane: its states after each task, and the steps of training before each merge."""

    run: RunFolder
    label: str
    states: list[tuple[float, float, float]]
    steps: dict[int, tuple[XY, XY]]


def trajectories(
    folders: Sequence[Path],
    grid: int = 9,
    images: int | None = 60,
    trained: bool = True,
    progress: Progress = SILENT,
) -> Result:
    """Draw the trajectories of runs that started from the same weights, over a map of the accuracy.

    With ``trained``, tasks of methods that average are re-run, to show the weights before each merge.
    """
    runs = open_all(folders)
    _refuse_others(runs)
    states = [[run.backbone(t) for t in range(1, run.tasks + 1)] for run in runs]
    start = runs[0].backbone(0)
    flat = principal([start, *(weights for one in states for weights in one)])
    found = [
        _trajectory(flat, run, label, [start, *some], trained, progress)
        for run, label, some in zip(runs, labels(runs), states, strict=True)
    ]
    surface = _surface(flat, found, runs[0], grid, images, progress) if grid else None
    spot = Spot(*found[0].states[0][:2], "θ_0")
    trails = [Trail(one.label, [(x, y) for x, y, _ in one.states], list(one.steps.values())) for one in found]
    title = "States after each task" + (" (dotted: before a merge)" if trained else "")
    figure = plane(surface, [spot], trails, title)
    said = [f"the plane holds {100 * flat.kept:.1f} % of the variance of all states"]
    return Result("trajectories", [*_rows(found), *_ground(surface)], {"trajectories": figure}, said)


def _trajectory(
    flat: Plane, run: RunFolder, label: str, states: Sequence[Weights], trained: bool, progress: Progress
) -> Trajectory:
    places = [flat.coordinates(weights) for weights in states]
    steps: dict[int, tuple[XY, XY]] = {}
    method = run.method
    if trained and isinstance(method, Aligned) and method.averages_with:
        _, stream = load_tasks(run, progress)
        for t in range(2, run.tasks + 1):
            network = untagged("backbone", relearn(run, t, progress, stream).trained)
            end = flat.coordinates({key: network[key] for key in run.parameters})
            begin = places[0 if method.restarts else t - 1]
            steps[t] = (begin[:2], end[:2])
    return Trajectory(run, label, places, steps)


def _surface(
    flat: Plane,
    found: Sequence[Trajectory],
    run: RunFolder,
    grid: int,
    images: int | None,
    progress: Progress,
) -> Surface:
    """Measure the accuracy of class means on a grid around all trajectories."""
    drawn = [place[:2] for one in found for place in one.states]
    drawn += [end for one in found for _, end in one.steps.values()]
    xs, ys = (axis([min(values), max(values)], grid) for values in zip(*drawn, strict=True))
    context, stream = load_tasks(run, progress)
    seen = fewer(stream, images)
    net = build_like(run.facts)
    if batchnorm_layers(net):
        raise CofimaError(
            f"backbone {run.facts.name} has batch normalization, whose statistics belong to one network: "
            "a plane of several runs cannot be measured; --grid 0 draws the trajectories alone"
        )
    values: list[list[float]] = []
    for y in progress.track(ys, len(ys), "rows of the plane"):
        values.append([])
        for x in xs:
            net.load_state_dict(flat.weights(x, y) | _other(run, net))
            values[-1].append(class_means(net, seen, context, images))
    return Surface(xs, ys, values, "Accuracy of class means (%)")


def _other(run: RunFolder, net: torch.nn.Module) -> Weights:
    """Return the buffers of the initial backbone."""
    return {key: run.start[key] for key in net.state_dict() if key not in run.parameters}


@torch.inference_mode()
def class_means(net: torch.nn.Module, seen: Stream, context: Context, images: int | None) -> float:
    """Return the accuracy (%) of a nearest-class-mean classifier with cosine similarity."""
    net.to(context.device).eval()
    if images is not None:
        most = max(len(task.classes) for task in seen)
        seen = seen.limited("train", max(1, images // most), 0)
    train = join([task.train for task in seen])
    pairs = [(normalize(net(x).float()), y) for x, y in plain_batches(train, context, "class means")]
    features, own = (torch.cat(part) for part in zip(*pairs, strict=True))
    means = torch.stack([features[own == label].mean(0) for label in range(seen[-1].classes.stop)])

    def predict(pixels: Tensor) -> Tensor:
        return normalize(net(pixels).float()) @ normalize(means).T

    return measure(predict, seen, context).mean("accuracy", "all")


def _refuse_others(runs: Sequence[RunFolder]) -> None:
    """Raise for runs that started from other weights, or learned other tasks, than the first."""
    first, wrong = runs[0], []
    for run in runs[1:]:
        if run.facts.sha256 != first.facts.sha256:
            wrong.append(f"{run.folder} began at other weights than {first.folder}")
        ours, theirs = ([row.classes for row in each.history] for each in (first, run))
        if ours != theirs:
            wrong.append(f"{run.folder} learned other tasks than {first.folder}")
    if wrong:
        raise CofimaError("\n".join(wrong))


def _rows(found: Sequence[Trajectory]) -> list[dict[str, object]]:
    return [
        {
            "run": str(one.run.folder),
            "method": one.run.config.method,
            "after": t,
            "x": x,
            "y": y,
            "beside": away,
            "trained_x": one.steps[t][1][0] if t in one.steps else "",
            "trained_y": one.steps[t][1][1] if t in one.steps else "",
            "lam": one.run.history[t - 1].lam if t else "",
            "accuracy_of_class_means": "",
        }
        for one in found
        for t, (x, y, away) in enumerate(one.states)
    ]


def _ground(surface: Surface | None) -> list[dict[str, object]]:
    """Return a row per point of the grid; these belong to no run."""
    blank = dict.fromkeys(("run", "method", "after", "trained_x", "trained_y", "lam"), "")
    return (
        [
            {**blank, "x": x, "y": y, "beside": 0.0, "accuracy_of_class_means": value}
            for y, values in zip(surface.ys, surface.values, strict=True)
            for x, value in zip(surface.xs, values, strict=True)
        ]
        if surface
        else []
    )
