"""Kernels that sum squared per-sample gradients over a batch, one per kind of parameter.

The per-sample gradient of a weight is as large as the weight itself, so storing those of a whole batch would
take the model's memory times the batch size. Every kernel therefore squares and sums a few samples at a
time.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

_CACHED = 1 << 17  # elements that stay in a core's cache between two operations
_BLOCK = 1 << 19  # elements per matrix product: with smaller blocks, call overhead outweighs cache misses
_SMALL_MAP = 144  # positions of a feature map, up to which a convolution's call overhead outweighs its work
_SPARE = 1 << 26  # elements of scratch memory on an accelerator, where large operations are fast


def add_products(grad: Tensor, given: Tensor, total: Tensor) -> None:
    """Add ``sum_b (sum_t grad[b,t] given[b,t]^T)^2`` to ``total``: the weight of a linear layer.

    Shapes: grad (samples, tokens, out), given (samples, tokens, in), total (out, in).
    """
    if grad.shape[1] > 1 and not grad[:, -1].any():
        # After the last attention only the class token reaches the head, and the other tokens have zero
        # gradient: skipping them is exact.
        kept = grad.any(2).any(0).nonzero()[:, 0]
        grad, given = grad[:, kept], given[:, kept]
    if grad.shape[1] == 1:
        # One token: the gradient is an outer product, its square the outer product of squares, and the sum
        # over samples a single matrix product.
        total.addmm_(grad[:, 0].square().T, given[:, 0].square())
    elif grad.device.type == "cpu":
        _products_in_cache(grad, given, total)
    else:
        for some in _parts(len(grad), _SPARE // total.numel()):
            total += torch.bmm(grad[some].transpose(1, 2), given[some]).square().sum(0)


def _products_in_cache(grad: Tensor, given: Tensor, total: Tensor) -> None:
    # Sample by sample, a few rows at a time, so that each product is squared before it leaves the cache.
    rows = max(1, _BLOCK // total.shape[1])
    product = total.new_empty(min(rows, total.shape[0]), total.shape[1])
    for start in range(0, total.shape[0], rows):
        part = total[start : start + rows]
        buffer = product[: len(part)]
        for g, a in zip(grad[:, :, start : start + rows].unbind(), given.unbind(), strict=True):
            torch.mm(g.T, a, out=buffer)
            part.addcmul_(buffer, buffer)


def _parts(samples: int, at_once: int) -> Iterator[slice]:
    step = max(1, at_once)
    return (slice(start, start + step) for start in range(0, samples, step))


def add_sums(factor: Tensor | None, shape: torch.Size, grad: Tensor, total: Tensor) -> None:
    """Add the squared per-sample gradients of a tensor of ``shape`` that was broadcast over samples.

    The tensor was added to the data (``factor`` is ``None``) or multiplied by ``factor``.
    """
    aligned = (1,) * (grad.ndim - len(shape)) + tuple(shape)
    over = [d for d in range(1, grad.ndim) if aligned[d] == 1 and grad.shape[d] > 1]
    for some in _parts(len(grad), 2 * _CACHED // max(1, grad[0].numel())):
        g = grad[some] if factor is None else grad[some] * factor[some]
        g = g.sum(over) if over else g
        total += g.square().sum(0).view(total.shape)


def channel_sums(grad: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return the sum of ``grad``, or of its product with ``factor``, over positions [samples, channels]."""
    positions = [*range(2, grad.ndim)]
    if not positions:
        return grad if factor is None else grad * factor
    if factor is None:
        return grad.sum(positions)
    parts = _parts(len(grad), 2 * _CACHED // max(1, grad[0].numel()))
    return torch.cat([(grad[some] * factor[some]).sum(positions) for some in parts])


def add_convolution(given: Tensor, weight: Tensor, how: "Convolution", grad: Tensor, total: Tensor) -> None:
    """Add the squared per-sample gradients of a convolution's ``weight``."""
    given = functional.pad(given, how.before) if any(how.before) else given
    if how.is_pointwise(weight):
        add_products(grad.flatten(2).transpose(1, 2), given.flatten(2).transpose(1, 2), total.flatten(1))
        return
    if how.is_full_image(given):
        _add_unfolded(given, weight, how, grad, total)
        return
    if how.is_shifted(given, weight, grad):
        _add_shifted(given, weight, how, grad, total)
        return
    for some in _parts(len(grad), how.at_once(given, weight)):
        # One call for several samples: as groups of one convolution, their gradients stay separate.
        g, a = grad[some], given[some]
        n = len(g)
        own = weight.expand(n, *weight.shape).flatten(0, 1)
        squares = torch.ops.aten.convolution_backward(
            g.reshape(1, -1, *g.shape[2:]),
            a.reshape(1, -1, *a.shape[2:]),
            own,
            None,
            how.stride,
            how.padding,
            how.dilation,
            False,
            [0] * len(how.stride),
            n * how.groups,
            [False, True, False],
        )[1].square_()
        total += squares.view(n, *weight.shape).sum(0)


def _add_unfolded(given: Tensor, weight: Tensor, how: "Convolution", grad: Tensor, total: Tensor) -> None:
    # A convolution is a linear layer on patches (im2col): one matrix product per sample, which CPUs do best.
    size, dilation, padding, stride = map(tuple, (weight.shape[2:], how.dilation, how.padding, how.stride))
    for some in _parts(len(grad), _CACHED // (weight[0].numel() * grad[0, 0].numel())):
        patches = functional.unfold(given[some], size, dilation, padding, stride)
        add_products(grad[some].flatten(2).transpose(1, 2), patches.transpose(1, 2), total.flatten(1))


def _add_shifted(given: Tensor, weight: Tensor, how: "Convolution", grad: Tensor, total: Tensor) -> None:
    # In a depthwise convolution, each position of the kernel sees a shifted copy of its channel, and its
    # gradient is the sum of the products with that copy. With channels last in memory this is never slower
    # than a convolution, and on small feature maps it beats the call overhead of one in any format.
    down, across = shifts(weight, given, grad, how.stride, how.padding, how.dilation)
    given = given.permute(0, 2, 3, 1)
    for some in _parts(len(grad), _CACHED // grad[0].numel()):
        g, a = grad[some].permute(0, 2, 3, 1).contiguous(), given[some]
        gradients = [
            (g[:, out_rows, out_columns] * a[:, rows, columns]).sum((1, 2))
            for rows, out_rows in down
            for columns, out_columns in across
        ]
        total += torch.stack(gradients).square_().sum(1).T.reshape(total.shape)


def shifts(
    weight: Tensor,
    given: Tensor,
    grad: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[list[tuple[slice, slice]]]:
    """Return, per axis and kernel position, the slice of inputs it is applied to and that of its outputs.

    Outputs for which the position falls on padding are left out: they contribute nothing.
    """
    sizes = weight.shape[2:], given.shape[2:], grad.shape[2:]
    return [list(_shifts(*each)) for each in zip(*sizes, stride, padding, dilation, strict=True)]


def _shifts(
    kernel: int, size: int, out: int, stride: int, padding: int, dilation: int
) -> Iterator[tuple[slice, slice]]:
    for place in range(kernel):
        shift = place * dilation - padding  # output o is computed from input o * stride + shift
        first = max(0, -(shift // stride))
        last = max(first, min(out, (size - 1 - shift) // stride + 1))
        start = first * stride + shift
        yield slice(start, start + (last - first) * stride, stride), slice(first, last)


class Convolution:
    """Stride, padding, dilation and groups of a convolution; ``padding="same"`` is applied to its input."""

    def __init__(
        self,
        weight: Tensor,
        stride: int | tuple[int, ...],
        padding: str | int | tuple[int, ...],
        dilation: int | tuple[int, ...],
        groups: int,
    ) -> None:
        dims = weight.ndim - 2
        self.stride = _each(stride, dims)
        self.dilation = _each(dilation, dims)
        self.groups = groups
        self.padding = [0] * dims
        self.before: list[int] = []
        if padding == "same":
            for size, step in zip(reversed(weight.shape[2:]), reversed(self.dilation), strict=True):
                whole = step * (size - 1)
                self.before += [whole // 2, whole - whole // 2]
        elif not isinstance(padding, str):
            self.padding = _each(padding, dims)

    def is_pointwise(self, weight: Tensor) -> bool:
        """Return True if each output position sees exactly one input position: a linear layer on tokens."""
        alone = all(size == 1 for size in weight.shape[2:]) and self.groups == 1
        return alone and not any(self.padding) and all(step == 1 for step in self.stride)

    def is_full_image(self, given: Tensor) -> bool:
        """Return True for an ungrouped 2D convolution on the CPU."""
        return given.device.type == "cpu" and given.ndim == 4 and self.groups == 1

    def is_shifted(self, given: Tensor, weight: Tensor, grad: Tensor) -> bool:
        """Return True for a depthwise convolution on the CPU, with channels last or a small output map."""
        alone = weight.ndim == 4 and weight.shape[1] == 1 and self.groups == weight.shape[0] > 1
        if not alone or grad.device.type != "cpu":
            return False
        last = given.is_contiguous(memory_format=torch.channels_last)
        return last or grad.shape[2:].numel() <= _SMALL_MAP

    def at_once(self, given: Tensor, weight: Tensor) -> int:
        """Return the number of samples per call."""
        if given.device.type != "cpu":
            return _SPARE // weight.numel()
        depthwise = weight.shape[1] == 1 and self.groups > 1
        if given.ndim == 4 and given.is_contiguous(memory_format=torch.channels_last):
            return 1  # several samples as groups of one call would need a copy in another memory format
        return _CACHED // given[0].numel() if depthwise else 1


def _each(value: int | tuple[int, ...], dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values
