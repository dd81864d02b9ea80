r"""Task vectors, :math:`\tau_k = \theta_k - \theta_0`, and the rules that merge them.

Task arithmetic: Ilharco et al., "Editing Models with Task Arithmetic", ICLR 2023,
https://arxiv.org/abs/2212.04089. TIES: Yadav et al., "TIES-Merging: Resolving Interference When Merging
Models", NeurIPS 2023, https://arxiv.org/abs/2306.01708. MagMax: Marczak et al., ECCV 2024,
https://arxiv.org/abs/2407.06322. Model Stock: Jang et al., "Model Stock: All We Need Is Just a Few
Fine-Tuned Models", ECCV 2024, https://arxiv.org/abs/2403.19522. Model Breadcrumbs: Davari and Belilovsky,
ECCV 2024, https://arxiv.org/abs/2312.06795. DARE: Yu et al., "Language Models are Super Mario", ICML 2024,
https://arxiv.org/abs/2311.03099. OPCM: Tang et al., 2025, https://arxiv.org/abs/2501.09522.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from cofima.weights.decompositions import svd

_NOTHING = 1e-12  # share of all singular values, below which one is rounding
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


def largest_vector(base: Tensor, models: Sequence[Tensor], lam: float) -> Tensor:
    r"""Return :math:`\theta_0 + \lambda\,\tau`, each element of the task vector that is largest there."""
    start = base.double()
    vector = torch.zeros_like(start)
    for model in models:
        vector = larger(vector, model.double() - start)
    return start.add_(vector, alpha=lam)


def model_stock(base: Tensor, models: Sequence[Tensor], share: float) -> Tensor:
    r"""Return :math:`(1 - t)\,\theta_0 + t\,\frac1N\sum_k \theta_k`, the share t from :func:`stock_share`."""
    total = base.double() * (1 - share)
    for model in models:
        total.add_(model.double(), alpha=share / len(models))
    return total


def products(base: Tensor, models: Sequence[Tensor]) -> Tensor:
    """Return the products of all pairs of task vectors [models, models]; those of parts add up."""
    vectors = torch.stack([(model.double() - base.double()).flatten() for model in models])
    return vectors @ vectors.T


def stock_share(products: Tensor) -> float:
    r"""Return Model Stock's :math:`t = N \cos\varphi / (1 + (N - 1) \cos\varphi)` of a layer.

    :math:`\cos\varphi` is that of the angle between two task vectors, of more than two the mean over all
    pairs. It is 0 for a model that did not move, and where it is negative, since the mean of vectors that
    disagree lies no nearer to the center than the base does. One model alone stays as it is.

    Args:
        products: Products of all pairs of the layer's task vectors, as :func:`products` returns them.
    """
    count = len(products)
    if count == 1:
        return 1.0
    lengths = products.diagonal().sqrt()
    cosines = (products / torch.outer(lengths, lengths)).nan_to_num(nan=0.0)
    cosine = float(cosines.sum() - cosines.trace()) / (count * (count - 1))
    cosine = min(max(cosine, 0.0), 1.0)
    return count * cosine / (1 + (count - 1) * cosine)


def breadcrumbs(
    base: Tensor, models: Sequence[Tensor], bands: Sequence[tuple[float, float]], scales: Sequence[float]
) -> Tensor:
    r"""Return :math:`\theta_0 + \sum_k \lambda_k\, m_k \tau_k`, with both tails of each task vector masked.

    Args:
        base: The common start.
        models: The fine-tuned weights.
        bands: Of each task vector, the magnitudes that count: from the first on, and below the second, as
            :func:`band` finds them for a layer.
        scales: Scale of each task vector.
    """
    total = base.double()
    for model, (least, most), scale in zip(models, bands, scales, strict=True):
        vector, size = model.double() - base.double(), magnitudes(base, model)
        total = total.add(torch.where((size >= least) & (size < most), vector, 0.0), alpha=scale)
    return total


def dare(
    base: Tensor, models: Sequence[Tensor], kept: Sequence[Tensor], density: float, scales: Sequence[float]
) -> Tensor:
    r"""Return :math:`\theta_0 + \sum_k \lambda_k\, m_k \tau_k / p`: dropped by chance, the rest rescaled.

    Args:
        base: The common start.
        models: The fine-tuned weights.
        kept: True for each element of each task vector that is kept.
        density: Probability p that an element is kept.
        scales: Scale of each task vector.
    """
    total = base.double()
    for model, mine, scale in zip(models, kept, scales, strict=True):
        vector = torch.where(mine, model.double() - base.double(), 0.0)
        total = total.add(vector, alpha=scale / density)
    return total


def larger(earlier: Tensor, later: Tensor) -> Tensor:
    """Return, element by element, the task vector of larger magnitude; of equal ones the later."""
    return torch.where(later.abs() >= earlier.abs(), later, earlier)


def outside(merged: Tensor, vector: Tensor, alpha: float) -> Tensor:
    r"""Return what of a layer's task vector lies outside the main directions of a merged one (OPCM).

    With :math:`U S V^\top` of ``merged``, the first r singular values at most the share ``alpha`` of all:
    without what maps the first r of V to the first r of U, and without the components
    :math:`u_i^\top \tau v_i` of the others, which only make a direction of ``merged`` longer or shorter.

    Args:
        merged: The matrix of the merged vector so far, in double precision.
        vector: The matrix of the new one.
        alpha: 0 takes away the components alone, 1 all that ``merged`` maps from and to.
    """
    u, lengths, vh = svd(merged)
    some = lengths > lengths.sum() * _NOTHING  # along others nothing was learned, and any basis will do
    u, lengths, vh = u[:, some], lengths[some], vh[some]
    main = int((lengths.cumsum(0) <= alpha * lengths.sum() * (1 + _NOTHING)).sum())
    seen = u.T @ vector @ vh.T
    taken = torch.diag(seen.diagonal())
    taken[:main, :main] = seen[:main, :main]
    rest: Tensor = vector - u @ taken @ vh
    return rest


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
    return _ranked(vectors, max(1, int(density * count)))


def band(
    vectors: Callable[[], Iterable[Tensor]], count: int, density: float, outliers: float
) -> tuple[float, float]:
    """Return the magnitudes that are kept of ``count``, from the first on and below the second.

    The share ``outliers`` of the largest is dropped, then the share ``density`` of all is kept.
    """
    dropped = int(outliers * count)
    kept = min(max(1, int(density * count)), count - dropped)
    least = _ranked(vectors, dropped + kept) if 0 < dropped + kept < count else 0.0
    return least, _ranked(vectors, dropped) if dropped else float("inf")


def _ranked(vectors: Callable[[], Iterable[Tensor]], rank: int) -> float:
    """Return the magnitude of this rank, the largest having rank 1."""
    upper, above = _bin(vectors, lambda bits: bits >> _HALF, rank)
    lower, _ = _bin(vectors, lambda bits: bits[(bits >> _HALF) == upper] & (2**_HALF - 1), rank - above)
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
