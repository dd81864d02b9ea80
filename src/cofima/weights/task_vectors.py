r"""Task vectors, :math:`\tau_k = \theta_k - \theta_0`: task arithmetic and TIES merging.

Task arithmetic: Ilharco et al., "Editing Models with Task Arithmetic", ICLR 2023,
https://arxiv.org/abs/2212.04089. TIES: Yadav et al., "TIES-Merging: Resolving Interference When Merging
Models", NeurIPS 2023, https://arxiv.org/abs/2306.01708.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

_HALF = 16  # bits of a float32: the upper half is searched first, then the lower


def task_arithmetic(base: Tensor, models: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    r"""Return :math:`\theta_0 + \sum_k \lambda_k (\theta_k - \theta_0)`, in double precision.

    Computed as :math:`(1 - \sum_k \lambda_k)\,\theta_0 + \sum_k \lambda_k \theta_k`: one model with
    scale 1 is that model bit for bit.
    """
    total = base.double() * (1 - sum(scales))
    for model, scale in zip(models, scales, strict=True):
        total.add_(model.double(), alpha=scale)
    return total


def ties(
    base: Tensor, models: Sequence[Tensor], thresholds: Sequence[float], weights: Sequence[float], lam: float
) -> Tensor:
    r"""Return :math:`\theta_0 + \lambda\,\tau` with the task vectors merged by TIES, in double precision.

    Trim: of each task vector only magnitudes from its threshold on count. Elect: the sign of the
    (weighted) sum of what is left. Merge: the (weighted) mean over the models that have this sign.
    Where the sum is 0, no sign is elected and the base stays.

    Args:
        base: The common start.
        models: The fine-tuned weights.
        thresholds: Least magnitude that is kept of each task vector, as :func:`threshold` finds it.
        weights: How much each model counts in the election and in the mean.
        lam: Scale of the merged task vector.
    """
    votes = torch.zeros(base.shape, dtype=torch.float64, device=base.device)
    for model, least, weight in zip(models, thresholds, weights, strict=True):
        votes.add_(_trimmed(base, model, least), alpha=weight)
    sign = votes.sign()
    total, count = torch.zeros_like(votes), torch.zeros_like(votes)
    for model, least, weight in zip(models, thresholds, weights, strict=True):
        agrees = (_trimmed(base, model, least).sign() == sign) & (sign != 0)
        count.add_(agrees, alpha=weight)
        total.add_(torch.where(agrees, model.double(), 0.0), alpha=weight)
    start = base.double()
    # the mean of task vectors is the mean of the models less the base: one model alone stays as it is
    moved = (start * (1 - lam)).add_(total / count, alpha=lam)
    return torch.where(count > 0, moved, start)


def larger(earlier: Tensor, later: Tensor) -> Tensor:
    """Return, element by element, the task vector of larger magnitude; of equal ones the later."""
    return torch.where(later.abs() >= earlier.abs(), later, earlier)


def magnitudes(base: Tensor, model: Tensor) -> Tensor:
    """Return the magnitude of a task vector, in single precision, as the trimming compares it."""
    moved: Tensor = (model.double() - base.double()).abs().float()
    return moved


def threshold(vectors: Callable[[], Iterable[Tensor]], count: int, density: float) -> float:
    """Return the least of the ``density`` largest of ``count`` magnitudes, exactly.

    The vectors are read twice, one at a time, and never held together: non-negative floats are ordered as
    the integers with the same bits, so two histograms find the value, by its upper 16 bits, then its lower.
    """
    if density >= 1 or count == 0:
        return 0.0
    kept = max(1, int(density * count))
    upper, above = _bin(vectors, lambda bits: bits >> _HALF, kept)
    lower, _ = _bin(vectors, lambda bits: bits[(bits >> _HALF) == upper] & (2**_HALF - 1), kept - above)
    return float(torch.tensor((upper << _HALF) | lower, dtype=torch.int32).view(torch.float32))


def _bin(
    vectors: Callable[[], Iterable[Tensor]], number: Callable[[Tensor], Tensor], wanted: int
) -> tuple[int, int]:
    """Return the bin that holds the ``wanted`` largest number, and how many are in the bins above it."""
    counts = torch.zeros(2**_HALF, dtype=torch.int64)
    for vector in vectors():
        counts += torch.bincount(number(vector.reshape(-1).view(torch.int32)), minlength=2**_HALF)
    from_above = counts.flip(0).cumsum(0)
    place = int((from_above < wanted).sum())
    return 2**_HALF - 1 - place, int(from_above[place] - counts.flip(0)[place])


def _trimmed(base: Tensor, model: Tensor, least: float) -> Tensor:
    vector = model.double() - base.double()
    return torch.where(vector.abs().float() >= least, vector, 0.0)
