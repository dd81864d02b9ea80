"""Distances between weights, and the automatic averaging coefficient (``lam=auto``)."""

import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from cofima.core.errors import CofimaWarning
from cofima.weights.average import check_fisher, check_fit
from cofima.weights.ops import chunks, shared_keys


@torch.no_grad()
def weight_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    r"""Return :math:`\|a - b\|_2` over the floating-point weights that both state dicts have.

    Args:
        a: A state dict.
        b: Another one; keys that only one of the two has are ignored.

    Returns:
        The Euclidean distance, computed in float64.

    Raises:
        CofimaError: A shared key with different shapes.
    """
    both = a.keys() & b.keys()
    shared = shared_keys({k: a[k] for k in both}, {k: b[k] for k in b if k in both})
    return math.sqrt(sum(_squares(a[key], b[key]) for key in shared))


@torch.no_grad()
def auto_lambda(
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    fisher_old: Mapping[str, Tensor],
    fisher_new: Mapping[str, Tensor],
    *,
    fallback: float = 0.4,
) -> float:
    r"""Return the share of the new weights that minimizes the sum of two quadratic losses.

    With :math:`d = \theta_{new} - \theta_{old}` and the Fishers as curvatures of the old loss at
    ``old`` and of the new loss at ``new``, the minimum on the segment between them lies at

    .. math:: \lambda^* = \frac{\langle F_{new}, d^2\rangle}
                               {\langle F_{old}, d^2\rangle + \langle F_{new}, d^2\rangle}

    Derivation: on the segment :math:`\theta_{old} + \lambda d` the two losses are
    :math:`\tfrac12 \lambda^2 \langle F_{old}, d^2\rangle` and
    :math:`\tfrac12 (1-\lambda)^2 \langle F_{new}, d^2\rangle`; the derivative of their sum is 0 there.
    Where this is 0/0 (the weights are equal, or both curvatures are 0 along ``d``), ``fallback`` is
    returned with a warning.

    Args:
        old: State dict before the task.
        new: State dict after the task.
        fisher_old: Diagonal Fisher information of ``old``, under the same keys.
        fisher_new: Diagonal Fisher information of ``new``.
        fallback: Result where the formula is undefined.

    Returns:
        The ``lam`` to pass to :func:`average` or :func:`fisher_average`, from 0 to 1.

    Raises:
        CofimaError: Weights that do not match, or Fisher values that are negative or not finite.

    Example::

        lam = auto_lambda(old, new, fisher_old, fisher_new)
        merged = average(old, new, lam)
    """
    shared = shared_keys(old, new)
    for key in shared:
        check_fit(key, new[key], (fisher_old, fisher_new))
    keys = [key for key in shared if key in fisher_new]  # not buffers, which have no Fisher
    for key in keys:
        check_fisher(key, fisher_old[key], fisher_new[key])
    curvature_old = sum(_squares(old[key], new[key], fisher_old[key]) for key in keys)
    curvature_new = sum(_squares(old[key], new[key], fisher_new[key]) for key in keys)
    total = curvature_old + curvature_new
    if not 0 < total < math.inf:
        warnings.warn(
            f"lam=auto is undefined (curvatures {curvature_old:g}, {curvature_new:g}): using {fallback}",
            CofimaWarning,
            stacklevel=2,
        )
        return fallback
    return curvature_new / total


@torch.no_grad()
def least_loss(
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    center: Mapping[str, Tensor],
    curvature: Mapping[str, Tensor],
    fisher: Mapping[str, Tensor],
) -> float:
    r"""Return the share of ``new``, from 0 to 1, that minimizes the sum of two quadratic losses.

    With :math:`d = \theta_{new} - \theta_{old}`, a loss of curvature C around c and one of curvature F around
    ``new``, it is :math:`(\langle F, d^2\rangle - \langle C\,(\theta_{old} - c), d\rangle) /
    \langle C + F, d^2\rangle`, clamped to [0, 1]; 1 if both curvatures are 0 along ``d``. Before the first
    task there is no first loss, and ``center`` and ``curvature`` are empty.
    """
    gain = total = 0.0
    for key in shared_keys(old, new):
        if key not in fisher:
            continue
        a, b = old[key].double(), new[key].double()
        d, f = b - a, fisher[key].to(a)
        own = float((f * d.square()).sum())
        gain, total = gain + own, total + own
        if key in curvature:
            c = curvature[key].to(a)
            gain -= float((c * (a - center[key].to(a)) * d).sum())
            total += float((c * d.square()).sum())
    return min(1.0, max(0.0, gain / total)) if 0 < total < math.inf else 1.0


def _squares(a: Tensor, b: Tensor, weight: Tensor | None = None) -> float:
    """Return the (weighted) sum of squared differences in float64, without a full-size copy."""
    a, b = a.reshape(-1), b.reshape(-1).to(a.device)
    total = 0.0
    for at in chunks(a):
        square = (a[at].double() - b[at].double()).square_()
        if weight is not None:
            square.mul_(weight.reshape(-1)[at].to(square))
        total += float(torch.sum(square))
    return total
