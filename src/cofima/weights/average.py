r"""Averages of weights: plain, and weighted by Fisher information; of two models, or of any number.

Marouf et al., "Weighted Ensemble Models Are Strong Continual Learners", ECCV 2024,
https://arxiv.org/abs/2312.08977: Eq. 3 and 7 for two models, Eq. 2 and 6 for any number.

The averages of two models are interpolations from ``old`` to ``new`` with a share :math:`w` of the new
weights, :math:`\theta^* = \theta_{old} + w\,(\theta_{new} - \theta_{old})`: a number for CoMA, one number
per weight for CoFiMA. Unlike a quotient of sums, this form cannot leave the interval between its operands
by rounding. They work in chunks and in place, since a method calls them after every task; the averages of
any number work in float64, tensor by tensor.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cofima.core.errors import CofimaError
from cofima.weights.ops import Scratch, Weights, chunks, compute_dtype, shared_keys

_PIECE = 1 << 20  # elements at once: so many operations a piece that their calls count more than the cache
_INFINITY = {  # the bits of infinity, above which lie those of NaN and of negative numbers
    torch.float16: (np.uint16, 0x7C00),
    torch.float32: (np.uint32, 0x7F800000),
    torch.float64: (np.uint64, 0x7FF0000000000000),
}

Mix = Callable[[Tensor, Tensor, Tensor, str, slice], Tensor]


@torch.no_grad()
def average(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor], lam: float, *, out: Weights | None = None
) -> Weights:
    r"""Return :math:`(1 - \lambda)\,\theta_{old} + \lambda\,\theta_{new}` (Eq. 3).

    Keys that only ``new`` has (the head of new classes) and integer buffers come from ``new``.
    ``lam`` 0 and 1 return the endpoints bit for bit. Half precision is averaged in float32.

    Args:
        old: The weights before the task.
        new: The weights after it.
        lam: Share of the new weights, from 0 to 1.
        out: Where to write, instead of fresh memory; may be ``old`` or ``new`` itself.
    """
    check_lam(lam)
    return _interpolate(old, new, lam, lambda a, b, to, key, at: torch.lerp(a, b, lam, out=to), out)


@torch.no_grad()
def fisher_average(
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    fisher_old: Mapping[str, Tensor],
    fisher_new: Mapping[str, Tensor],
    lam: float,
    *,
    scale: float = 1.0,
    out: Weights | None = None,
) -> Weights:
    r"""Return the average weighted by Fisher information, element by element (Eq. 7).

    .. math:: \theta^* = \frac{\lambda F_{new} \theta_{new} + (1-\lambda) F_{old} \theta_{old}}
                              {\lambda F_{new} + (1-\lambda) F_{old}}

    Where both Fishers are 0, and for floating-point buffers, which have none: :func:`average`.
    Only the ratio of the two Fishers enters, so their common scale does not matter.

    Args:
        old: The weights before the task.
        new: The weights after it.
        fisher_old: Diagonal Fisher information of ``old``, by the same names.
        fisher_new: Diagonal Fisher information of ``new``.
        lam: Share of the new weights where both Fishers are equal, from 0 to 1.
        scale: Factor of ``fisher_new``, such as :func:`~cofima.weights.equal_step.equal_step` finds it.
        out: Where to write, instead of fresh memory; may be ``old`` or ``new`` itself.
    """
    check_lam(lam)
    if not 0 < scale < float("inf"):
        raise CofimaError(f"the scale of a Fisher must be positive and finite, got {scale}")
    for key in shared_keys(old, new):
        check_fit(key, new[key], (fisher_old, fisher_new))
    least = torch.float32 if scale == 1 else torch.float64  # a scale may exceed the range of float32
    scratch = Scratch()

    def mix(a: Tensor, b: Tensor, to: Tensor, key: str, at: slice) -> Tensor:
        if key not in fisher_new:
            return torch.lerp(a, b, lam, out=to)
        f_old, f_new = (f[key].reshape(-1)[at].to(a.device) for f in (fisher_old, fisher_new))
        check_fisher(key, f_old, f_new)
        wide = torch.promote_types(a.dtype, torch.promote_types(f_old.dtype, f_new.dtype))
        wide = torch.promote_types(wide, least)
        share = new_share(f_old.to(wide), f_new.to(wide), lam, scale, out=scratch.like(a, wide))
        return torch.lerp(a, b, share.to(a.dtype), out=to)

    return _interpolate(old, new, lam, mix, out)


@torch.no_grad()
def average_all(models: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None) -> Weights:
    r"""Return :math:`\sum_k w_k \theta_k / \sum_k w_k` (Eq. 2); equal weights where none are given.

    A key that only some models have is averaged over these; integer buffers come from the last one.
    """
    return _weighted_mean(models, None, check_model_weights(len(models), weights))


@torch.no_grad()
def fisher_average_all(
    models: Sequence[Mapping[str, Tensor]],
    fishers: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float] | None = None,
) -> Weights:
    r"""Return :math:`\sum_k w_k F_k \theta_k / \sum_k w_k F_k`, element by element (Eq. 6, with weights).

    Where all Fishers are 0, and for buffers, which have none: :func:`average_all`.
    """
    counts = check_model_weights(len(models), weights)
    if len(models) != len(fishers) or not models:
        raise CofimaError(f"fisher_average_all needs one Fisher a model: {len(models)} and {len(fishers)}")
    for key, value in {k: v for model in models for k, v in model.items() if v.is_floating_point()}.items():
        check_fit(key, value, [f for model, f in zip(models, fishers, strict=True) if key in model])

    def fisher(k: int, key: str, part: Tensor) -> Tensor:
        if key not in fishers[k]:
            return torch.ones_like(part, dtype=torch.float64)
        check_fisher(key, fishers[k][key])
        return fishers[k][key].to(part.device, torch.float64)

    return _weighted_mean(models, fisher, counts)


def new_share(
    f_old: Tensor, f_new: Tensor, lam: float, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    r"""Return :math:`\lambda c F_{new} / (\lambda c F_{new} + (1-\lambda) F_{old})`, and ``lam`` for 0/0.

    Written as :math:`1 / (1 + \frac{1-\lambda}{\lambda c} \frac{F_{old}}{F_{new}})`, c the ``scale``: an
    overflow of the ratio is the right limit 0, an underflow the right limit 1. Needs 0 < lam < 1.
    """
    ratio = torch.div(f_old, f_new, out=out)
    torch.add(ratio.new_ones(()), ratio, alpha=(1 - lam) / lam / scale, out=ratio)
    return ratio.reciprocal_().nan_to_num_(nan=lam)


def check_lam(lam: float) -> None:
    """Raise unless ``lam`` is a number from 0 to 1."""
    if not 0 <= lam <= 1:
        raise CofimaError(f"lam must lie between 0 and 1, got {lam}")


def _interpolate(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor], lam: float, mix: Mix, out: Weights | None
) -> Weights:
    """Fill the result chunk by chunk, so that the operands stay in the processor's cache."""
    merged: Weights = {} if out is None else out
    shared = set(shared_keys(old, new))
    scratch = Scratch()
    for key, value in new.items():
        if key not in merged:
            merged[key] = torch.empty_like(value, memory_format=torch.contiguous_format)
        target = merged[key]
        if key not in shared or lam in (0, 1):
            target.copy_(old[key] if key in shared and lam == 0 else value)
            continue
        a, b, flat = (part.reshape(-1) for part in (old[key], value, target))
        dtype = compute_dtype(value)
        for at in chunks(value, _PIECE):
            to = flat[at] if flat.dtype == dtype else scratch.like(flat[at], dtype)
            mixed = mix(a[at].to(value.device, dtype), b[at].to(dtype), to, key, at)
            if mixed.dtype != flat.dtype:
                flat[at] = mixed
        if not target.is_contiguous():  # then reshape(-1) made a copy, and `flat` does not write through
            target.copy_(flat.view(target.shape))
    return merged


def check_fit(key: str, value: Tensor, fishers: Sequence[Mapping[str, Tensor]]) -> None:
    """Raise unless all Fishers of a weight have its shape, or none exists, as for buffers."""
    shapes = [tuple(f[key].shape) if key in f else None for f in fishers]
    if len(set(shapes)) > 1 or shapes[0] not in (None, tuple(value.shape)):
        found = ", ".join("missing" if s is None else str(list(s)) for s in shapes)
        raise CofimaError(f"Fisher of '{key}' does not fit its weight {list(value.shape)}: {found}")


def check_fisher(key: str, *values: Tensor) -> None:
    """Raise on Fisher information that is negative or not finite."""
    for value in values:
        if value.numel() and not _surely_valid(value):
            low, high = torch.aminmax(value)
            if not (low >= 0 and high < float("inf")):
                raise CofimaError(f"Fisher of '{key}' must be finite and not negative, found {low} to {high}")


def _surely_valid(value: Tensor) -> bool:
    """Return True if bits alone show in one pass that all numbers are finite and not negative.

    False does not mean that one is: it may be -0.0, or of a type or device that is not looked at.
    """
    if value.device.type != "cpu" or value.dtype not in _INFINITY:
        return False
    kind, infinity = _INFINITY[value.dtype]
    return bool(value.detach().numpy().view(kind).max() < infinity)


def check_model_weights(models: int, weights: Sequence[float] | None) -> list[float]:
    """Return one weight for each model, equal ones by default; raise on invalid weights."""
    counts = [1.0] * models if weights is None else list(weights)
    if len(counts) != models or not models:
        raise CofimaError(f"an average needs one weight a model: {len(counts)} for {models}")
    if not min(counts) >= 0 or not 0 < sum(counts) < float("inf"):
        raise CofimaError(f"weights must be finite, not negative and not all 0, got {counts}")
    return counts


def _weighted_mean(
    models: Sequence[Mapping[str, Tensor]],
    fisher: Callable[[int, str, Tensor], Tensor] | None,
    counts: Sequence[float],
) -> Weights:
    """Average in float64 over the models that have a key; ``fisher`` adds a weight for each element."""
    merged: Weights = {}
    for last in models:
        merged.update(last)
    for key, value in merged.items():
        holders = [k for k, model in enumerate(models) if key in model]
        for k in holders:
            shared_keys({key: models[k][key]}, {key: value})  # raises on different shapes
        if not value.is_floating_point():
            merged[key] = value.clone()
            continue
        parts, plain = [models[k][key] for k in holders], [counts[k] for k in holders]
        plain = plain if sum(plain) > 0 else [1.0] * len(plain)  # only models of weight 0 have this key
        shares = [share / max(plain) for share in plain]  # a common scale must not overflow or underflow
        by = None if fisher is None else [fisher(k, key, v) for k, v in zip(holders, parts, strict=True)]
        merged[key] = _mean(parts, shares, by).to(value.dtype)
    return merged


def _mean(values: Sequence[Tensor], shares: Sequence[float], by: Sequence[Tensor] | None) -> Tensor:
    """Average with one weight for each value, times one for each element if ``by`` is given."""
    total = torch.zeros_like(values[0], dtype=torch.float64)
    if by is None:
        for value, share in zip(values, shares, strict=True):
            total.add_(value, alpha=share)
        return total.div_(sum(shares))
    # Fishers span many orders of magnitude: relative to the largest of each element, their sum lies between
    # 1 and the number of models, and neither the products nor the quotient can overflow or vanish.
    largest = torch.stack([b * share for b, share in zip(by, shares, strict=True)]).amax(0)
    weight = torch.zeros_like(total)
    for value, share, b in zip(values, shares, by, strict=True):
        mine = torch.where(largest > 0, b * share / largest, share)  # all Fishers 0: the plain average
        total.addcmul_(mine, value.double())
        weight.add_(mine)
    return total.div_(weight)
