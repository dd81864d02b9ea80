r"""Weight averaging, plain or Fisher-weighted, of two models or of any number.

Marouf et al., "Weighted Ensemble Models Are Strong Continual Learners", ECCV 2024,
https://arxiv.org/abs/2312.08977: Eq. 3 and 7 for two models, Eq. 2 and 6 for any number.

The two-model averages interpolate from ``old`` to ``new`` with a share :math:`w` of the new weights,
:math:`\theta^* = \theta_{old} + w\,(\theta_{new} - \theta_{old})`: a scalar for CoMA, one value per weight
for CoFiMA. Unlike a quotient of sums, this form cannot round to a value outside the interval between its
operands. Methods call these functions after every task, so they work in chunks and can write in place. The
averages of any number of models accumulate in float64, tensor by tensor.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cofima.core.errors import CofimaError
from cofima.weights.ops import Scratch, Weights, chunks, compute_dtype, shared_keys

_PIECE = 1 << 20  # elements per chunk: with this many operations, call overhead outweighs cache misses
_INFINITY = {  # bit pattern of infinity; as unsigned integers, NaN and negative numbers compare greater
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

    Keys found only in ``new`` (the head of new classes) and integer buffers are copied from ``new``.
    With ``lam`` 0 or 1 the endpoints are returned bit for bit. Half precision is averaged in float32.

    Args:
        old: State dict before the task.
        new: State dict after the task.
        lam: Share of the new weights, from 0 to 1.
        out: State dict to write into instead of allocating; may be ``old`` or ``new`` itself.

    Returns:
        The averaged state dict, with the keys and dtypes of ``new``; it is ``out`` if that is given.

    Raises:
        CofimaError: ``lam`` outside [0, 1], a key missing from ``new``, or shapes that differ.

    Example::

        from cofima.weights import average, snapshot

        old = snapshot(model)
        train(model)
        model.load_state_dict(average(old, snapshot(model), lam=0.4))
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
    r"""Return the elementwise Fisher-weighted average (Eq. 7).

    .. math:: \theta^* = \frac{\lambda F_{new} \theta_{new} + (1-\lambda) F_{old} \theta_{old}}
                              {\lambda F_{new} + (1-\lambda) F_{old}}

    Elements whose Fishers are both 0, and floating-point buffers, which have no Fisher, are averaged as in
    :func:`average`. Only the ratio of the two Fishers enters, so their common scale does not matter.

    Args:
        old: State dict before the task.
        new: State dict after the task.
        fisher_old: Diagonal Fisher information of ``old``, under the same keys.
        fisher_new: Diagonal Fisher information of ``new``.
        lam: Share of the new weights where both Fishers are equal, from 0 to 1.
        scale: Factor applied to ``fisher_new``, for example the one that
            :func:`~cofima.weights.equal_step.equal_step` returns.
        out: State dict to write into instead of allocating; may be ``old`` or ``new`` itself.

    Returns:
        The averaged state dict, with the keys and dtypes of ``new``; it is ``out`` if that is given.

    Raises:
        CofimaError: ``lam`` or ``scale`` out of range, weights or Fishers whose keys or shapes do not match,
            or Fisher values that are negative or not finite.

    Example::

        from cofima.weights import diagonal_fisher, fisher_average, snapshot

        fisher_old, old = diagonal_fisher(model, old_batches), snapshot(model)
        train(model)
        fisher_new, new = diagonal_fisher(model, new_batches), snapshot(model)
        model.load_state_dict(fisher_average(old, new, fisher_old, fisher_new, lam=0.4))
    """
    check_lam(lam)
    if not 0 < scale < float("inf"):
        raise CofimaError(f"the scale of a Fisher must be positive and finite, got {scale}")
    for key in shared_keys(old, new):
        check_fit(key, new[key], (fisher_old, fisher_new))
    least = torch.float32 if scale == 1 else torch.float64  # a scale may be outside the range of float32
    scratch = Scratch()

    def mix(a: Tensor, b: Tensor, to: Tensor, key: str, at: slice) -> Tensor:
        if key not in fisher_new:  # a floating-point buffer, such as running statistics
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
    r"""Return :math:`\sum_k w_k \theta_k / \sum_k w_k` (Eq. 2).

    A key that only some models have is averaged over those models; integer buffers come from the last one.

    Args:
        models: State dicts, all with the same shape for a shared key.
        weights: One non-negative weight per model, not all 0; equal by default.

    Returns:
        The averaged state dict, with the union of all keys.

    Raises:
        CofimaError: No models, invalid ``weights``, or shapes that differ.
    """
    return _weighted_mean(models, None, check_model_weights(len(models), weights))


@torch.no_grad()
def fisher_average_all(
    models: Sequence[Mapping[str, Tensor]],
    fishers: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float] | None = None,
) -> Weights:
    r"""Return :math:`\sum_k w_k F_k \theta_k / \sum_k w_k F_k`, element by element (Eq. 6, with weights).

    Elements whose Fishers are all 0, and buffers, which have no Fisher, are averaged as in
    :func:`average_all`.

    Args:
        models: State dicts, all with the same shape for a shared key.
        fishers: Diagonal Fisher information of each model, under the same keys.
        weights: One non-negative weight per model, not all 0; equal by default.

    Returns:
        The averaged state dict, with the union of all keys.

    Raises:
        CofimaError: Invalid ``weights``, a Fisher that is missing or does not match its weight, or Fisher
            values that are negative or not finite.
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

    Computed as :math:`1 / (1 + \frac{1-\lambda}{\lambda c} \frac{F_{old}}{F_{new}})` with c the ``scale``:
    if the ratio overflows, the result is the correct limit 0; if it underflows, the correct limit 1.
    Requires 0 < lam < 1.
    """
    ratio = torch.div(f_old, f_new, out=out)
    factor = min((1 - lam) / lam / scale, torch.finfo(ratio.dtype).max)  # torch rejects larger numbers
    torch.add(ratio.new_ones(()), ratio, alpha=factor, out=ratio)
    return ratio.reciprocal_().nan_to_num_(nan=lam)


def check_lam(lam: float) -> None:
    """Raise unless ``lam`` is a number from 0 to 1."""
    if not 0 <= lam <= 1:
        raise CofimaError(f"lam must lie between 0 and 1, got {lam}")


def _interpolate(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor], lam: float, mix: Mix, out: Weights | None
) -> Weights:
    """Apply ``mix`` chunk by chunk, so that the operands stay in the CPU cache."""
    merged: Weights = {} if out is None else out
    shared = set(shared_keys(old, new))
    scratch = Scratch()
    for key, value in new.items():
        if key not in merged:
            merged[key] = torch.empty_like(value, memory_format=torch.contiguous_format)
        target = merged[key]
        if key not in shared or lam in (0, 1):
            # the endpoints are copied, not computed: rounding must not change a single bit
            target.copy_(old[key] if key in shared and lam == 0 else value)
            continue
        a, b, flat = (part.reshape(-1) for part in (old[key], value, target))
        dtype = compute_dtype(value)
        for at in chunks(value, _PIECE):
            to = flat[at] if flat.dtype == dtype else scratch.like(flat[at], dtype)
            mixed = mix(a[at].to(value.device, dtype), b[at].to(dtype), to, key, at)
            if mixed.dtype != flat.dtype:  # half precision: computed in scratch memory, rounded once here
                flat[at] = mixed
        if not target.is_contiguous():  # reshape(-1) made a copy, so writes to `flat` did not reach `target`
            target.copy_(flat.view(target.shape))
    return merged


def check_fit(key: str, value: Tensor, fishers: Sequence[Mapping[str, Tensor]]) -> None:
    """Raise unless all Fishers of a weight have its shape, or all are missing, as for buffers."""
    shapes = [tuple(f[key].shape) if key in f else None for f in fishers]
    if len(set(shapes)) > 1 or shapes[0] not in (None, tuple(value.shape)):
        found = ", ".join("missing" if s is None else str(list(s)) for s in shapes)
        raise CofimaError(f"Fisher of '{key}' does not fit its weight {list(value.shape)}: {found}")


def check_fisher(key: str, *values: Tensor) -> None:
    """Raise if Fisher information is negative or not finite."""
    for value in values:
        if value.numel() and not _surely_valid(value):
            low, high = torch.aminmax(value)
            if not (low >= 0 and high < float("inf")):
                raise CofimaError(f"Fisher of '{key}' must be finite and not negative, found {low} to {high}")


def _surely_valid(value: Tensor) -> bool:
    """Return True if one pass over the bit patterns shows that all values are finite and non-negative.

    False is inconclusive: the tensor may hold -0.0, or have a dtype or device that this test skips.
    """
    if value.device.type != "cpu" or value.dtype not in _INFINITY:
        return False
    kind, infinity = _INFINITY[value.dtype]
    return bool(value.detach().numpy().view(kind).max() < infinity)


def check_model_weights(models: int, weights: Sequence[float] | None) -> list[float]:
    """Return one weight per model, equal by default; raise if the weights are invalid."""
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
    """Average each key in float64 over the models that have it; ``fisher`` adds a weight per element."""
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
        shares = [share / max(plain) for share in plain]  # so that very large or small weights are safe
        by = None if fisher is None else [fisher(k, key, v) for k, v in zip(holders, parts, strict=True)]
        merged[key] = _mean(parts, shares, by).to(value.dtype)
    return merged


def _mean(values: Sequence[Tensor], shares: Sequence[float], by: Sequence[Tensor] | None) -> Tensor:
    """Average with one weight per tensor, times one per element if ``by`` is given."""
    total = torch.zeros_like(values[0], dtype=torch.float64)
    if by is None:
        for value, share in zip(values, shares, strict=True):
            total.add_(value, alpha=share)
        return total.div_(sum(shares))
    # Fishers span many orders of magnitude. Dividing by the largest per element keeps their sum between 1 and
    # the number of models, so neither the products nor the quotient can overflow or underflow.
    largest = torch.stack([b * share for b, share in zip(by, shares, strict=True)]).amax(0)
    weight = torch.zeros_like(total)
    for value, share, b in zip(values, shares, by, strict=True):
        mine = torch.where(largest > 0, b * share / largest, share)  # all Fishers 0: the plain average
        total.addcmul_(mine, value.double())
        weight.add_(mine)
    return total.div_(weight)
