r"""Task vectors, :math:`\tau_k = \theta_k - \theta_0`, and rules for merging them.

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

_NOTHING = 1e-12  # relative to the sum of singular values: anything smaller is rounding error
_HALF = 16  # half the bits of a float32: the upper half is searched first, then the lower


def task_arithmetic(base: Tensor, models: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    r"""Return :math:`\theta_0 + \sum_k \lambda_k (\theta_k - \theta_0)`, in double precision.

    Computed as :math:`(1 - \sum_k \lambda_k)\,\theta_0 + \sum_k \lambda_k \theta_k`, so that a single model
    with scale 1 is returned bit for bit.
    """
    total = base.double() * (1 - sum(scales))
    for model, scale in zip(models, scales, strict=True):
        total.add_(model.double(), alpha=scale)
    return total


def ties(
    base: Tensor, models: Sequence[Tensor], thresholds: Sequence[float], weights: Sequence[float], lam: float
) -> Tensor:
    r"""Return :math:`\theta_0 + \lambda\,\tau` with :math:`\tau` merged by TIES, in double precision.

    Trim: set the elements of each task vector below its threshold to 0. Elect: take the sign of the
    (weighted) sum of the trimmed vectors. Merge: take the (weighted) mean over the models with this sign.
    Where the sum is 0, no sign is elected and the base is kept.

    Args:
        base: The pre-trained weights that all models started from.
        models: The fine-tuned weights.
        thresholds: Smallest magnitude kept, one per task vector; see :func:`threshold`.
        weights: Weight of each model in the election and in the mean.
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
    # averaging models instead of task vectors is equivalent, and returns a single model bit for bit
    moved = (start * (1 - lam)).add_(total / count, alpha=lam)
    return torch.where(count > 0, moved, start)


def largest_vector(base: Tensor, models: Sequence[Tensor], lam: float) -> Tensor:
    r"""Return :math:`\theta_0 + \lambda\,\tau`, where :math:`\tau` has the largest magnitude per element."""
    start = base.double()
    vector = torch.zeros_like(start)
    for model in models:
        vector = larger(vector, model.double() - start)
    return start.add_(vector, alpha=lam)


def model_stock(base: Tensor, models: Sequence[Tensor], share: float) -> Tensor:
    r"""Return :math:`(1 - t)\,\theta_0 + t\,\frac1N\sum_k \theta_k`, with t from :func:`stock_share`."""
    total = base.double() * (1 - share)
    for model in models:
        total.add_(model.double(), alpha=share / len(models))
    return total


def products(base: Tensor, models: Sequence[Tensor]) -> Tensor:
    """Return the Gram matrix of the task vectors [models, models]; those of chunks can be added."""
    vectors = torch.stack([(model.double() - base.double()).flatten() for model in models])
    return vectors @ vectors.T


def stock_share(products: Tensor) -> float:
    r"""Return Model Stock's :math:`t = N \cos\varphi / (1 + (N - 1) \cos\varphi)` for a layer.

    :math:`\varphi` is the angle between two task vectors; for more than two models the cosine is averaged
    over all pairs. The cosine of a zero task vector counts as 0, and so does a negative mean, since
    averaging vectors that point apart brings the weights no closer to the center than the base. A single
    model is kept unchanged (t = 1).

    Args:
        products: Gram matrix of the layer's task vectors, from :func:`products`.
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
        base: The pre-trained weights that all models started from.
        models: The fine-tuned weights.
        bands: Range of magnitudes kept, one per task vector: lower bound (inclusive) and upper bound
            (exclusive); see :func:`band`.
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
    r"""Return :math:`\theta_0 + \sum_k \lambda_k\, m_k \tau_k / p`: random elements dropped, others rescaled.

    Args:
        base: The pre-trained weights that all models started from.
        models: The fine-tuned weights.
        kept: One boolean mask per task vector, True where an element is kept.
        density: Probability p that an element is kept.
        scales: Scale of each task vector.
    """
    total = base.double()
    for model, mine, scale in zip(models, kept, scales, strict=True):
        vector = torch.where(mine, model.double() - base.double(), 0.0)
        total = total.add(vector, alpha=scale / density)
    return total


def larger(earlier: Tensor, later: Tensor) -> Tensor:
    """Return the element of larger magnitude, elementwise; on a tie, that of ``later``."""
    return torch.where(later.abs() >= earlier.abs(), later, earlier)


def outside(merged: Tensor, vector: Tensor, alpha: float) -> Tensor:
    r"""Project a layer's task vector onto the complement of the merged one's main directions (OPCM).

    Let :math:`U S V^\top` be the singular value decomposition of ``merged``, and r the largest rank whose
    singular values sum to at most the share ``alpha`` of the total. Removed from ``vector`` are the block
    between the first r columns of U and of V, and the diagonal components :math:`u_i^\top \tau v_i` of the
    others, which would only rescale a direction of ``merged``.

    Args:
        merged: Matrix of the merged task vector so far, in double precision.
        vector: Matrix of the new task vector.
        alpha: 0 removes only the diagonal components; 1 removes the whole block spanned by ``merged``.
    """
    u, lengths, vh = svd(merged)
    some = lengths > lengths.sum() * _NOTHING  # vectors of a zero singular value are an arbitrary basis
    u, lengths, vh = u[:, some], lengths[some], vh[some]
    main = int((lengths.cumsum(0) <= alpha * lengths.sum() * (1 + _NOTHING)).sum())
    seen = u.T @ vector @ vh.T
    taken = torch.diag(seen.diagonal())
    taken[:main, :main] = seen[:main, :main]
    rest: Tensor = vector - u @ taken @ vh
    return rest


def magnitudes(base: Tensor, model: Tensor) -> Tensor:
    """Return the elementwise magnitude of a task vector in single precision, as used for trimming."""
    moved: Tensor = (model.double() - base.double()).abs().float()
    return moved


def threshold(vectors: Callable[[], Iterable[Tensor]], count: int, density: float) -> float:
    """Return the smallest of the ``density * count`` largest magnitudes, exactly.

    The vectors are read twice, one at a time, and never held in memory together. Non-negative floats sort
    like the integers with the same bits, so two histograms find the value: first its upper 16 bits, then its
    lower 16.
    """
    if density >= 1 or count == 0:
        return 0.0
    return _ranked(vectors, max(1, int(density * count)))


def band(
    vectors: Callable[[], Iterable[Tensor]], count: int, density: float, outliers: float
) -> tuple[float, float]:
    """Return the range of magnitudes to keep: lower bound (inclusive) and upper bound (exclusive).

    Of ``count`` elements, the share ``outliers`` with the largest magnitudes is dropped; of the rest, the
    largest are kept, up to the share ``density`` of all.
    """
    dropped = int(outliers * count)
    kept = min(max(1, int(density * count)), count - dropped)
    least = _ranked(vectors, dropped + kept) if 0 < dropped + kept < count else 0.0
    return least, _ranked(vectors, dropped) if dropped else float("inf")


def _ranked(vectors: Callable[[], Iterable[Tensor]], rank: int) -> float:
    """Return the magnitude of the given rank; the largest has rank 1."""
    upper, above = _bin(vectors, lambda bits: bits >> _HALF, rank)
    lower, _ = _bin(vectors, lambda bits: bits[(bits >> _HALF) == upper] & (2**_HALF - 1), rank - above)
    return float(torch.tensor((upper << _HALF) | lower, dtype=torch.int32).view(torch.float32))


def _bin(
    vectors: Callable[[], Iterable[Tensor]], number: Callable[[Tensor], Tensor], wanted: int
) -> tuple[int, int]:
    """Return the bin that holds the number of rank ``wanted``, and how many numbers lie in higher bins."""
    counts = torch.zeros(2**_HALF, dtype=torch.int64)
    for vector in vectors():
        counts += torch.bincount(number(vector.reshape(-1).view(torch.int32)), minlength=2**_HALF)
    from_above = counts.flip(0).cumsum(0)
    place = int((from_above < wanted).sum())
    return 2**_HALF - 1 - place, int(from_above[place] - counts.flip(0)[place])


def _trimmed(base: Tensor, model: Tensor, least: float) -> Tensor:
    vector = model.double() - base.double()
    return torch.where(vector.abs().float() >= least, vector, 0.0)
