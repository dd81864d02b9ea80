"""Rules that turn the gradient at a torch function's output into squared per-sample gradients.

A rule receives the arguments of one call and returns, for each parameter among them, a function that adds
the squared per-sample gradients once the gradient at the output is known. It returns an empty list if
samples do not lie along the first dimension or would mix, as in batch normalization with batch statistics.
An empty list is always correct, since such parameters are left to the reference.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cofima.weights.fisher.kernels import (
    Convolution,
    add_convolution,
    add_products,
    add_sums,
    channel_sums,
)

Square = Callable[[Tensor, Tensor], None]
"""Add squared per-sample gradients to the second argument, given the gradient of the output."""

Parts = list[tuple[Tensor | None, Square]]
"""The parameters of one call, each with its :data:`Square`; empty if the rule does not apply."""

Rule = Callable[..., Parts]


def linear(samples: int, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Parts:
    """Handle ``input @ weight.T + bias``, whose input may have any number of token dimensions."""
    if input.ndim < 2 or not _by_sample(samples, input) or weight.ndim != 2:
        return []
    return [
        (weight, partial(_linear_weight, samples, input)),
        (bias, partial(_trailing_dims, samples, None, 1)),
    ]


def _linear_weight(samples: int, given: Tensor, grad: Tensor, total: Tensor) -> None:
    add_products(_tokens(samples, grad, 1), _tokens(samples, given, 1), total)


def affine(samples: int, input: Tensor, mat1: Tensor, mat2: Tensor) -> Parts:
    """Handle ``input + mat1 @ mat2``: a linear layer on flat tokens, with a transposed weight."""
    if not _by_sample(samples, mat1) or input.ndim != 1:
        return []
    return [
        (input, partial(_trailing_dims, samples, None, 1)),
        (mat2, partial(_affine_weight, samples, mat1)),
    ]


def _affine_weight(samples: int, given: Tensor, grad: Tensor, total: Tensor) -> None:
    add_products(_tokens(samples, given, 1), _tokens(samples, grad, 1), total)


def embedding(
    samples: int,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Parts:
    """Handle an embedding table with per-sample indices, such as token ids."""
    if max_norm is not None or scale_grad_by_freq or input.ndim == 0 or not _by_sample(samples, input):
        return []
    return [(weight, partial(_taken_rows, samples, input, padding_idx))]


def _taken_rows(samples: int, index: Tensor, padding: int | None, grad: Tensor, total: Tensor) -> None:
    # If a token occurs twice in a sample, its per-sample gradient is the sum of both: sum first, then square.
    rows, width = total.shape
    sample = torch.arange(samples, device=index.device).repeat_interleave(index.numel() // samples)
    found, at = torch.unique(index.flatten() + sample * rows, return_inverse=True)
    sums = grad.new_zeros(len(found), width).index_add_(0, at, grad.reshape(-1, width))
    found %= rows
    if padding is not None:
        sums[found == padding % rows] = 0
    total.index_add_(0, found, sums.square_())


def rows_for_all(
    samples: int, input: Tensor, weight: Tensor, padding_idx: int | None = None
) -> Tensor | None:
    """Return the rows of an embedding table that all samples share, each once, such as positions; else None.

    Such a lookup only selects rows, so their squares can be added to the table's at these indices.
    """
    index = input.flatten()
    once = input.shape[:1] == (1,) and samples > 1 and len(torch.unique(index)) == len(index)
    return index if once and (padding_idx is None or padding_idx not in index) else None


def layer_norm(
    samples: int,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Parts:
    """Handle layer normalization over the last dimensions."""
    dims = len(normalized_shape)
    if not _by_sample(samples, input) or input.ndim <= dims:
        return []
    # evaluated in the backward pass: storing the result would take as much memory as the input again
    scaled = partial(functional.layer_norm, input, normalized_shape, None, None, eps)
    return [
        (weight, partial(_trailing_dims, samples, scaled, dims)),
        (bias, partial(_trailing_dims, samples, None, dims)),
    ]


def rms_norm(
    samples: int,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Parts:
    """Handle root-mean-square normalization over the last dimensions."""
    dims = len(normalized_shape)
    if not _by_sample(samples, input) or input.ndim <= dims:
        return []
    scaled = partial(functional.rms_norm, input, normalized_shape, None, eps)
    return [(weight, partial(_trailing_dims, samples, scaled, dims))]


def _trailing_dims(
    samples: int, factor: Callable[[], Tensor] | None, dims: int, grad: Tensor, total: Tensor
) -> None:
    given = None if factor is None else _tokens(samples, factor(), dims)
    add_sums(given, total.shape, _tokens(samples, grad, dims), total)


def _by_sample(samples: int, x: Tensor) -> bool:
    # Tokens may be flattened into the first dimension, sample after sample. A layer that interleaves samples
    # passes this test, too, and is caught by the comparison with the reference.
    return len(x) >= samples and len(x) % samples == 0


def _tokens(samples: int, x: Tensor, dims: int) -> Tensor:
    tokens = x.shape[: x.ndim - dims].numel() // samples  # not -1: a layer may have no outputs
    return x.reshape(samples, tokens, *x.shape[x.ndim - dims :])


def batch_norm(
    samples: int,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Parts:
    """Handle batch normalization with running statistics; batch statistics would mix samples."""
    if training or len(input) != samples or running_mean is None or running_var is None:
        return []
    sums = _NormSums(input, running_mean, (running_var + eps).rsqrt())
    return [(weight, sums.add_weight), (bias, sums.add_bias)]


class _NormSums:
    """Gradients of weight and bias of a normalization with fixed mean and scale, from the same sums.

    The gradient of the weight is the sum of grad times (input - mean) times scale over positions: the mean
    and the scale, equal at all positions, are applied to sums, so no normalized input is computed again.
    """

    def __init__(self, given: Tensor, mean: Tensor, scale: Tensor) -> None:
        self.given, self.mean, self.scale = given, mean, scale

    def add_weight(self, grad: Tensor, total: Tensor) -> None:
        around = channel_sums(grad, self.given) - self.mean * channel_sums(grad)
        total += (around * self.scale).square_().sum(0)

    def add_bias(self, grad: Tensor, total: Tensor) -> None:
        total += channel_sums(grad).square().sum(0)


def group_norm(
    samples: int,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Parts:
    """Handle group normalization."""
    if len(input) != samples:
        return []
    return _channels(partial(functional.group_norm, input, num_groups, None, None, eps), weight, bias)


def _channels(scaled: Callable[[], Tensor], weight: Tensor | None, bias: Tensor | None) -> Parts:
    return [(weight, partial(_per_channel, scaled)), (bias, partial(_per_channel, None))]


def _per_channel(factor: Callable[[], Tensor] | None, grad: Tensor, total: Tensor) -> None:
    shape = torch.Size([total.numel()] + [1] * (grad.ndim - 2))
    add_sums(None if factor is None else factor(), shape, grad, total)


def convolution(
    samples: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Parts:
    """Handle a convolution of any stride, padding, dilation and grouping."""
    if input.ndim != weight.ndim or len(input) != samples:
        return []
    how = Convolution(weight, stride, padding, dilation, groups)
    return [
        (weight, partial(add_convolution, input, weight.detach(), how)),
        (bias, partial(_per_channel, None)),
    ]


def addition(samples: int, left: Any, right: Any) -> Parts:
    """Handle a parameter added to samples, such as a position embedding."""
    return _broadcast(samples, left, right, None) + _broadcast(samples, right, left, None)


def product(samples: int, left: Any, right: Any) -> Parts:
    """Handle a parameter that scales samples, such as a LayerScale."""
    return _broadcast(samples, left, right, left) + _broadcast(samples, right, left, right)


def _broadcast(samples: int, data: Any, other: Any, factor: Tensor | None) -> Parts:
    if not isinstance(data, Tensor) or not isinstance(other, Tensor) or other.ndim > data.ndim:
        return []
    aligned = (1,) * (data.ndim - other.ndim) + tuple(other.shape)
    # aligned[0] == 1: the parameter must be broadcast over samples, or its rows would belong to samples
    fits = all(b in (1, a) for a, b in zip(data.shape, aligned, strict=True))
    if not fits or data.ndim == 0 or len(data) != samples or aligned[0] != 1:
        return []
    return [(other, partial(add_sums, factor, other.shape))]


def expansion(samples: int, input: Tensor, *sizes: Any) -> Parts:
    """Handle a parameter repeated for every sample, such as a class token."""
    flat = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes  # (n, ...) or n, ...
    front = len(flat) - input.ndim
    repeated = flat[0] == samples and (front > 0 or input.shape[0] == 1)
    return [(input, partial(add_sums, None, input.shape))] if repeated else []


RULES: dict[Any, Rule] = {
    functional.linear: linear,
    functional.embedding: embedding,
    torch.addmm: affine,
    functional.layer_norm: layer_norm,
    functional.rms_norm: rms_norm,
    functional.batch_norm: batch_norm,
    functional.group_norm: group_norm,
    functional.conv1d: convolution,
    functional.conv2d: convolution,
    functional.conv3d: convolution,
    Tensor.expand: expansion,
}
RULES |= dict.fromkeys([torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__], addition)
RULES |= dict.fromkeys([torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__], product)

RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.unsqueeze, torch.unsqueeze, Tensor.flatten}
"""Functions that only reshape a parameter: elements keep their order, so the result is treated as it."""
