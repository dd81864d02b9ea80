r"""Fisher information of a merge per layer: overlap of old and new, and the resulting shares.

The overlap is that of Kirkpatrick et al. (PNAS 2017): with both scaled to sum 1,
:math:`\sum_i \sqrt{\hat F_i^{old} \hat F_i^{new}}`, 0 if they are disjoint and 1 if they are equal.
The share of the new weights is that of Eq. 7, :math:`\lambda F_t / (\lambda F_t + (1-\lambda) F^*_{t-1})`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cofima import methods
from cofima.analysis.output import Result
from cofima.analysis.plots import Bars, bars
from cofima.analysis.relearn import Relearned, relearn
from cofima.analysis.run_folder import by_layer, choose_task, open_run
from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT, Progress
from cofima.methods.base import Method
from cofima.methods.components.aligned import Aligned
from cofima.report.drawing import Curve, curves
from cofima.weights.average import new_share
from cofima.weights.ops import Weights

NEAR = 0.05  # shares this close to 0 or 1 count as all old or all new
BINS = 20


@dataclass(frozen=True)
class LayerFisher:
    """Old and new Fisher information of one layer, and the resulting shares."""

    layer: str
    weights: int
    mean_old: float
    mean_new: float
    zero_old: float
    zero_new: float
    overlap: float
    share_mean: float
    near_old: float
    near_new: float
    histogram: list[int]


def fisher(folder: Path, task: int | None = None, progress: Progress = SILENT) -> Result:
    """Measure the Fisher information of a task's merge, per layer."""
    run = open_run(folder)
    if not _uses_fisher(run.method):
        known = [name for name in methods.names() if _uses_fisher(methods.build(name))]
        raise CofimaError(
            f"{folder} is a run of {run.method.label}, which with its options does not average by Fisher "
            f"information; this analysis is for methods that do: {', '.join(known)}"
        )
    learned = relearn(run, choose_task(run, task), progress)
    layers = describe(learned)
    every = layers[0]
    said = [
        f"overlap of old and new: {every.overlap:.3f}",
        f"weights that stay next to the old: {100 * every.near_old:.1f} %, "
        f"that become next to the new: {100 * every.near_new:.1f} %, mean share {every.share_mean:.3f}",
    ]
    title = f"{run.label}, task {learned.task.index + 1}"
    return Result("fisher", _rows(learned, layers), _figures(layers, title), said)


def _uses_fisher(method: Method) -> bool:
    return isinstance(method, Aligned) and method.uses_fisher


def describe(task: Relearned) -> list[LayerFisher]:
    """Return statistics of all weights that both sides have, then of each layer."""
    both = [key for key in task.fisher_new if key in task.fisher_old]
    assert task.lam is not None
    lam = task.lam
    named = {key.removeprefix("backbone."): key for key in both}
    groups = {"all": list(named)} | by_layer(named)
    return [
        _describe(name, [named[key] for key in keys], task.fisher_old, task.fisher_new, lam)
        for name, keys in groups.items()
    ]


def _describe(layer: str, keys: Sequence[str], old: Weights, new: Weights, lam: float) -> LayerFisher:
    a, b = _flat(old, keys), _flat(new, keys)
    share = shares(a, b, lam)
    counts = torch.histc(share, BINS, 0.0, 1.0)
    sums = float(a.sum()), float(b.sum())
    overlap = float((a * b).sqrt().sum()) / (sums[0] * sums[1]) ** 0.5 if min(sums) > 0 else float("nan")
    return LayerFisher(
        layer,
        len(a),
        _mean(a),
        _mean(b),
        _mean(a == 0),
        _mean(b == 0),
        overlap,
        _mean(share),
        _mean(share < NEAR),
        _mean(share > 1 - NEAR),
        [int(count) for count in counts],
    )


def shares(old: Tensor, new: Tensor, lam: float) -> Tensor:
    """Return the share of the new weights; it is ``lam`` everywhere if that is 0 or 1."""
    return torch.full_like(old, lam) if lam in (0, 1) else new_share(old, new, lam)


def _flat(weights: Weights, keys: Iterable[str]) -> Tensor:
    return torch.cat([weights[key].reshape(-1).cpu().double() for key in keys])


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _rows(task: Relearned, layers: Sequence[LayerFisher]) -> list[dict[str, object]]:
    start = {"run": str(task.run.folder), "task": task.task.index + 1, "lam": task.lam}
    rows = []
    for each in layers:
        row = start | {key: value for key, value in vars(each).items() if key != "histogram"}
        bins = {f"share_{k / BINS:.2f}": count for k, count in enumerate(each.histogram)}
        rows.append(row | bins)
    return rows


def _figures(layers: Sequence[LayerFisher], title: str) -> dict[str, str]:
    every, single = layers[0], layers[1:]
    names, at = [each.layer for each in single], range(len(single))
    middle = [(k + 0.5) / BINS for k in range(BINS)]
    part = [100 * count / every.weights for count in every.histogram]
    return {
        "fisher": curves(
            [
                Curve("overlap of old and new", at, [each.overlap for each in single]),
                Curve("mean share of the new", at, [each.share_mean for each in single]),
                Curve(f"share below {NEAR:g}", at, [each.near_old for each in single]),
                Curve(f"share above {1 - NEAR:g}", at, [each.near_new for each in single]),
            ],
            "",
            "From 0 to 1",
            title,
            ticks=names,
        ),
        "fisher_shares": bars(
            [f"{x:.2f}" if k % 4 == 2 else "" for k, x in enumerate(middle)],
            [Bars("weights by their share of the new (%)", part)],
            "Weights (%)",
            title,
        ),
    }
