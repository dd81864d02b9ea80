r"""Equal steps: a scale for the new Fisher that makes plain and Fisher-weighted averages move equally far.

With :math:`d = \theta_{new} - \theta_{old}`, the plain average moves the old weights by
:math:`\lambda |d|`. The Fisher-weighted average moves them by :math:`|\alpha(1)\, d|`, which may be much
more or much less, since the scale of a Fisher depends on its task's loss:

.. math:: \alpha(c) = \frac{\lambda\, c\, F_{new}}{\lambda\, c\, F_{new} + (1-\lambda)\, F_{old}}

:math:`|\alpha(c)\, d|` grows with :math:`c`, so exactly one scale makes both steps equally long.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cofima.weights.average import check_fisher, check_fit, check_lam, new_share
from cofima.weights.ops import chunks, shared_keys

PASSES = 100  # upper limit, never reached: bisection alone converges in about 60
CLOSE = 1e-8  # relative tolerance on the squared length of the step
LARGEST = 600.0  # bound on |log c|: exp overflows float64 at 709
BEYOND = 40.0  # margin in log c: this far from every ratio of Fishers, all shares are 0 or 1

Chunks = Iterator[tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class EqualStep:
    r"""Result of :func:`equal_step`: the scale of the new Fisher, and the step it produces.

    Attributes:
        scale: The factor c of the new Fisher information.
        share: Length of the step relative to the full distance, :math:`|\alpha(c)\, d| / |d|`; equal to
            ``lam`` if ``reached``.
        reached: False if no scale gives a step of the requested length; ``scale`` then gives the nearest.
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

    Pass it to :func:`fisher_average` as ``scale``. Any constant factor of either Fisher cancels.

    Weights whose Fishers are both 0, and buffers, move by ``lam`` at every scale. A weight with only the new
    Fisher 0 never moves; one with only the old Fisher 0 always moves all the way. If these weights alone
    make the step too short or too long, no scale reaches the requested length: the scale is then so large
    (or so small) that all other weights move all the way (or not at all), which is the nearest step.

    Args:
        old: State dict before the task.
        new: State dict after the task.
        fisher_old: Diagonal Fisher information of ``old``, under the same keys.
        fisher_new: Diagonal Fisher information of ``new``.
        lam: Length of the step relative to the distance from ``old`` to ``new``, from 0 to 1.

    Returns:
        The scale, the relative length of the step, and whether that length is ``lam``.

    Raises:
        CofimaError: ``lam`` outside [0, 1], weights or Fishers whose keys or shapes do not match, or Fisher
            values that are negative or not finite.

    Example::

        step = equal_step(old, new, fisher_old, fisher_new, lam=0.4)
        merged = fisher_average(old, new, fisher_old, fisher_new, lam=0.4, scale=step.scale)
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

    if lam in (0, 1):  # the endpoints do not depend on the Fishers
        return EqualStep(1.0, lam, reached=True)
    way = _Way.measure(weights(), lam)
    goal = lam * lam * way.total
    if way.movable == 0:  # no weight moves, or every share is the same at every scale
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
    """Squared lengths of parts of the difference d, and the range of scales to search.

    Attributes:
        total: Squared length of d.
        fixed: Squared length of the part of a step that does not depend on the scale.
        movable: Squared length of d over the weights whose share depends on the scale.
        low: Logarithm of a scale at which these weights do not move.
        high: Logarithm of a scale at which they move all the way.
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
    """Return the scale at which the squared length of the step equals ``goal``, and that length.

    Safeguarded Newton iteration: Newton's step on the logarithms of scale and length if it stays inside the
    bracket, bisection otherwise. About ten passes over the weights are enough.
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
    """Return the squared length of the step at a scale, and its derivative with respect to log scale."""
    length = slope = 0.0
    for square, f_old, f_new in weights:
        share = new_share(f_old, f_new, lam, math.exp(log_scale))
        square.mul_(share.square())
        length += float(square.sum())
        square[(f_old == 0) & (f_new == 0)] = 0  # these have the share lam at every scale
        slope += 2 * float(square.mul_(1 - share).sum())
    return length, slope
