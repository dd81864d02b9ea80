r"""The plane through :math:`\theta_0`, :math:`\theta^*_{t-1}` and :math:`\theta_t`, measured on a grid.

CoMA's :math:`\theta^*_t` lies on the line between the last two; CoFiMA's lies off the plane, and is drawn at
the nearest point, with its distance. All points have the trained head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cofima.analysis.evaluate_at import AXES, NAMES, Evaluator, HeadKind, Measured, Measurement
from cofima.analysis.output import Result
from cofima.analysis.plane import Plane, through
from cofima.analysis.plots import Spot, Surface, plane
from cofima.analysis.relearn import Relearned, refuse_unsuited, relearn
from cofima.analysis.run_folder import choose_task, open_run
from cofima.core.progress import SILENT, Progress
from cofima.weights.ops import Weights

BACKBONE = "backbone."
MARGIN = 0.25  # relative to the triangle's width and height, on every side


@dataclass(frozen=True)
class Corner:
    """One of the three networks that span the plane, or the merged one, ``away`` from the plane."""

    name: str
    weights: Weights
    x: float
    y: float
    away: float


@dataclass(frozen=True)
class GridPoint:
    """A point of the grid with its measurement; ``name`` is that of a corner, or empty."""

    x: float
    y: float
    name: str
    found: Measurement


def landscape(
    folder: Path,
    task: int | None = None,
    grid: int = 15,
    images: int | None = 200,
    head: HeadKind = "raw",
    progress: Progress = SILENT,
) -> Result:
    """Measure the plane through the pre-trained weights and those before and after a task's training."""
    run = open_run(folder)
    refuse_unsuited(run)
    chosen = choose_task(run, task)
    run.backbone(0)  # raises, before any work, if the pre-trained weights are missing
    learned = relearn(run, chosen, progress)
    flat, corners = span(learned)
    places = survey(Evaluator(learned, head, images), learned, flat, corners, grid, progress)
    merged = corners[-1]
    title = f"{run.label}, task {chosen}"
    figures = {
        "landscape": _draw(places, corners, title, "accuracy", "all"),
        "landscape_loss": _draw(places, corners, title, "loss", "all"),
        "landscape_old": _draw(places, corners, title, "accuracy", "old"),
    }
    said = [f"θ*_{chosen} lies {merged.away:.4g} beside the plane"]
    return Result("landscape", _rows(learned, places, merged, head), figures, said)


def span(task: Relearned) -> tuple[Plane, list[Corner]]:
    """Return the plane through the three networks, and the positions of these and of the merged one."""
    t = task.task.index + 1
    old, trained, merged = (_parameters(task, w) for w in (task.old, task.trained, task.merged))
    start = {key: value.to(old[key].device) for key, value in task.run.backbone(0).items()}
    flat, places = through(old, trained, start)
    named = zip((f"θ*_{t - 1}", f"θ_{t}", "θ_0"), (old, trained, start), places, strict=True)
    corners = [Corner(name, weights, *place, 0.0) for name, weights, place in named]
    return flat, [*corners, Corner(f"θ*_{t}", merged, *flat.coordinates(merged))]


def survey(
    evaluator: Evaluator,
    task: Relearned,
    flat: Plane,
    corners: Sequence[Corner],
    grid: int,
    progress: Progress,
) -> list[GridPoint]:
    """Measure a grid that contains the three corners, which keep their own batch-norm statistics."""
    xs, ys = (axis([getattr(c, name) for c in corners[:3]], grid) for name in ("x", "y"))
    at = {(c.x, c.y): c for c in corners[:3]}
    places = [(x, y) for y in ys for x in xs]
    found = []
    for x, y in progress.track(places, len(places), "landscape"):
        corner = at.get((x, y))
        weights = flat.weights(x, y) if corner is None else corner.weights
        network = whole(task, weights, corner)
        name = "" if corner is None else corner.name
        found.append(GridPoint(x, y, name, evaluator.measure(network, statistics=corner is not None)))
    return found


def whole(task: Relearned, backbone: Weights, corner: Corner | None) -> Weights:
    """Return a network with these parameters, the buffers of its corner, and the trained head."""
    rest = task.trained
    if corner is not None and corner.name == "θ_0":
        rest = task.trained | {BACKBONE + key: value for key, value in task.run.start.items()}
    elif corner is not None and corner.name.startswith("θ*"):
        rest = task.trained | task.old
    return rest | {BACKBONE + key: value for key, value in backbone.items()}


def axis(values: Sequence[float], count: int) -> list[float]:
    """Return ``count`` coordinates over the range of ``values`` with a margin, including ``values``."""
    low, high = min(values), max(values)
    margin = MARGIN * (high - low)
    places = np.linspace(low - margin, high + margin, count).tolist()
    free = list(range(count))
    for value in sorted(set(values)):
        nearest = min(free, key=lambda place: abs(places[place] - value))
        free.remove(nearest)
        places[nearest] = value
    return sorted(places)


def _parameters(task: Relearned, network: Weights) -> Weights:
    return {key: network[BACKBONE + key] for key in task.run.parameters}


def _rows(task: Relearned, places: Sequence[GridPoint], merged: Corner, head: str) -> list[dict[str, object]]:
    start = task.columns() | {"head": head}
    rows = [
        start | {"x": p.x, "y": p.y, "network": p.name, "beside": 0.0} | p.found.columns() for p in places
    ]
    blank = dict.fromkeys(places[0].found.columns(), "")
    last = {"x": merged.x, "y": merged.y, "network": merged.name, "beside": merged.away}
    return [*rows, start | last | blank]


def _draw(
    places: Sequence[GridPoint], corners: Sequence[Corner], title: str, measured: Measured, part: str
) -> str:
    xs, ys = sorted({place.x for place in places}), sorted({place.y for place in places})
    value = {(p.x, p.y): p.found.mean(measured, part) for p in places}
    surface = Surface(xs, ys, [[value[x, y] for x in xs] for y in ys], f"{AXES[measured]} on {NAMES[part]}")
    return plane(surface, [Spot(c.x, c.y, c.name) for c in corners], [], title)
