r"""Equal steps: the scale of the new Fisher information at which two averages go equally far.

With :math:`d = \theta_{new} - \theta_{old}`, the plain average moves the old weights by
:math:`\lambda |d|`. The one weighted by Fisher information moves them by :math:`|\alpha(1)\, d|`, which
may be much more or less, since the scale of a Fisher depends on its task's loss:

.. math:: \alpha(c) = \frac{\lambda\, c\, F_{new}}{\lambda\, c\, F_{new} + (1-\lambda)\, F_{old}}

:math:`|\alpha(c)\, d|` grows with :math:`c`, so there is one scale at which both steps are equally long.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cofima.weights.average import check_fisher, check_fit, check_lam, new_share
from cofima.weights.ops import chunks, shared_keys

PASSES = 100  # far more than needed: a bisection alone ends after about 60
CLOSE = 1e-8  # relative error of the step's length at which the search ends
LARGEST = 600.0  # the largest logarithm of a scale: float64 ends at 709
BEYOND = 40.0  # on the scale of log c: so far from all ratios of Fishers, every share is 0 or 1

Chunks = Iterator[tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class EqualStep:
    r"""The scale of the new Fisher information, and the step to which it leads.

    Attributes:
        scale: The factor c of the new Fisher information.
        share: The length of the step over that of the whole way, :math:`|\alpha(c)\, d| / |d|`; ``lam``
            wherever the scale exists.
        reached: False if no scale gives a step of this length; the nearest is taken then.
    """

    scale: float
    share: float
    reached: bool


@torch.no_grad()
def equal_step(
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    fisher_old: Mapping[str, Tensor],
    fisher_new: Mapping[str, Tensor],
    lam: float,
) -> EqualStep:
    r"""Find the scale c of ``fisher_new`` with :math:`|\alpha(c)\, d| = \lambda |d|`.

    Give it to :func:`fisher_average` as ``scale``. Any constant factor of either Fisher cancels.

    Weights whose Fishers are both 0, and buffers, move by ``lam`` at every scale. Where only the new Fisher
    is 0, a weight never moves; where only the old one is 0, it always moves all the way. If these alone
    make the step too short or too long, no scale reaches its length: then the scale is so large (or so
    small) that all other weights move all the way (or not at all), which is the nearest step.

    Args:
        old: The weights before the task.
        new: The weights after it.
        fisher_old: Diagonal Fisher information of ``old``, by the same names.
        fisher_new: Diagonal Fisher information of ``new``.
        lam: Share of the way that the step goes, from 0 to 1.
    """
    check_lam(lam)
    keys = [key for key in shared_keys(old, new) if key in fisher_new or key in fisher_old]
    for key in keys:
        check_fit(key, new[key], (fisher_old, fisher_new))
        check_fisher(key, fisher_old[key], fisher_new[key])

    def weights() -> Chunks:
        """Yield chunks of squared differences with both Fishers, in float64."""
        for key in keys:
            parts = [w[key].reshape(-1) for w in (old, new, fisher_old, fisher_new)]
            for at in chunks(parts[1]):
                a, b, f_old, f_new = (part[at].to(parts[1].device, torch.float64) for part in parts)
                yield (b - a).square_(), f_old, f_new

    if lam in (0, 1):  # the ends need no Fisher information
        return EqualStep(1.0, lam, reached=True)
    way = _Way.measure(weights(), lam)
    goal = lam * lam * way.total
    if way.movable == 0:  # nothing moves, or each weight has its share at every scale
        scale, length = 1.0, way.fixed
    elif way.fixed < goal < way.fixed + way.movable:
        scale, length = _search(weights, lam, goal, way)
    else:
        end = way.low if goal <= way.fixed else way.high
        scale, length = math.exp(end), _step(weights(), lam, end)[0]
    share = math.sqrt(length / way.total) if way.total > 0 else lam
    return EqualStep(scale, share, reached=math.isclose(share, lam, rel_tol=1e-6))


@dataclass(frozen=True)
class _Way:
    """Squared lengths of the way from the old weights to the new ones, and the range of scales that matter.

    Attributes:
        total: The whole way.
        fixed: The part of a step that no scale changes.
        movable: The part of the way that a step goes more or less of, depending on the scale.
        low: A logarithm of the scale at which these weights stay.
        high: One at which they go the whole way.
    """

    total: float
    fixed: float
    movable: float
    low: float
    high: float

    @classmethod
    def measure(cls, weights: Chunks, lam: float) -> "_Way":
        total = fixed = movable = 0.0
        low, high = math.inf, -math.inf
        for square, f_old, f_new in weights:
            total += float(square.sum())
            fixed += float(square[(f_old == 0) & (f_new > 0)].sum())
            fixed += lam * lam * float(square[(f_old == 0) & (f_new == 0)].sum())
            both = (f_old > 0) & (f_new > 0) & (square > 0)
            if both.any():
                movable += float(square[both].sum())
                ratio = f_old[both].log_().sub_(f_new[both].log_())
                low, high = min(low, float(ratio.min())), max(high, float(ratio.max()))
        middle = math.log((1 - lam) / lam)
        return cls(
            total, fixed, movable, max(low + middle - BEYOND, -LARGEST), min(high + middle + BEYOND, LARGEST)
        )


def _search(weights: Callable[[], Chunks], lam: float, goal: float, way: _Way) -> tuple[float, float]:
    """Return the scale at which the squared length of the step is the goal, and that length.

    Bisection on the logarithm of the scale; Newton's step for the logarithm of the length where it stays
    inside the bracket, so that some ten passes over the weights are enough.
    """
    low, high, here, length = way.low, way.high, min(max(0.0, way.low), way.high), 0.0
    for _ in range(PASSES):
        length, slope = _step(weights(), lam, here)
        if abs(length - goal) <= CLOSE * goal:
            break
        low, high = (here, high) if length < goal else (low, here)
        newton = here - math.log(length / goal) * length / slope if length > 0 < slope else low
        here = newton if low < newton < high else (low + high) / 2
    return math.exp(here), length


def _step(weights: Chunks, lam: float, log_scale: float) -> tuple[float, float]:
    """Return the squared length of the step at a scale, and its derivative by the logarithm of the scale."""
    length = slope = 0.0
    for square, f_old, f_new in weights:
        share = new_share(f_old, f_new, lam, math.exp(log_scale))
        square.mul_(share.square())
        length += float(square.sum())
        square[(f_old == 0) & (f_new == 0)] = 0  # these have the share lam at every scale
        slope += 2 * float(square.mul_(1 - share).sum())
    return length, slope
