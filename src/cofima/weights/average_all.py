"""Averages of any number of models: the plain one (Eq. 2) and the one weighted by Fisher information (Eq. 6).

Marouf et al., "Weighted Ensemble Models Are Strong Continual Learners", ECCV 2024,
https://arxiv.org/abs/2312.08977.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from cofima.core.errors import CofimaError
from cofima.weights.average import check_fisher, check_fit
from cofima.weights.ops import Weights, shared_keys


@torch.no_grad()
def average_all(models: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None) -> Weights:
    r"""Return :math:`\sum_k w_k \theta_k / \sum_k w_k` (Eq. 2); equal weights where none are given.

    A key that only some models have is averaged over these; integer buffers come from the last one.
    """
    counts = check_counts(len(models), weights)
    return _weighted(models, None, counts)


@torch.no_grad()
def fisher_average_all(
    models: Sequence[Mapping[str, Tensor]],
    fishers: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float] | None = None,
) -> Weights:
    r"""Return :math:`\sum_k w_k F_k \theta_k / \sum_k w_k F_k`, element by element (Eq. 6, with weights).

    Where all Fishers are 0, and for buffers, which have none: :func:`average_all`.
    """
    counts = check_counts(len(models), weights)
    if len(models) != len(fishers) or not models:
        raise CofimaError(f"fisher_average_all needs one Fisher a model: {len(models)} and {len(fishers)}")
    for key, value in {k: v for model in models for k, v in model.items() if v.is_floating_point()}.items():
        check_fit(key, value, [f for model, f in zip(models, fishers, strict=True) if key in model])

    def weight(k: int, key: str, part: Tensor) -> Tensor:
        if key not in fishers[k]:
            return torch.ones_like(part, dtype=torch.float64)
        check_fisher(key, fishers[k][key])
        return fishers[k][key].to(part.device, torch.float64)

    return _weighted(models, weight, counts)


def check_counts(models: int, weights: Sequence[float] | None) -> list[float]:
    """Return one weight a model, equal ones where none are given; refuse what cannot be averaged by."""
    counts = [1.0] * models if weights is None else list(weights)
    if len(counts) != models or not models:
        raise CofimaError(f"an average needs one weight a model: {len(counts)} for {models}")
    if not min(counts) >= 0 or not 0 < sum(counts) < float("inf"):
        raise CofimaError(f"weights must be finite, not negative and not all 0, got {counts}")
    return counts


def _weighted(
    models: Sequence[Mapping[str, Tensor]],
    weight: Callable[[int, str, Tensor], Tensor] | None,
    counts: Sequence[float],
) -> Weights:
    """Average in float64, with weights that a common scale does not change."""
    merged: Weights = {}
    for last in models:
        merged.update(last)
    for key, value in merged.items():
        holders = [k for k, model in enumerate(models) if key in model]
        for k in holders:
            shared_keys({key: models[k][key]}, {key: value})
        if not value.is_floating_point():
            merged[key] = value.clone()
            continue
        parts, plain = [models[k][key] for k in holders], [counts[k] for k in holders]
        plain = plain if sum(plain) > 0 else [1.0] * len(plain)  # only models that count nothing have it
        shares = [share / max(plain) for share in plain]
        by = None if weight is None else [weight(k, key, v) for k, v in zip(holders, parts, strict=True)]
        merged[key] = _mean(parts, shares, by).to(value.dtype)
    return merged


def _mean(values: Sequence[Tensor], shares: Sequence[float], by: Sequence[Tensor] | None) -> Tensor:
    """Average by one number a value, or times one number for each of its elements."""
    total = torch.zeros_like(values[0], dtype=torch.float64)
    if by is None:
        for value, share in zip(values, shares, strict=True):
            total.add_(value, alpha=share)
        return total.div_(sum(shares))
    largest = torch.stack([b * share for b, share in zip(by, shares, strict=True)]).amax(0)
    weight = torch.zeros_like(total)
    for value, share, b in zip(values, shares, by, strict=True):
        mine = torch.where(largest > 0, b * share / largest, share)
        total.addcmul_(mine, value.double())
        weight.add_(mine)
    return total.div_(weight)
