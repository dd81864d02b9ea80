"""Model inputs: a tensor, or mappings and sequences of tensors, with one row per sample."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = Any
"""A tensor, or a mapping (token ids, masks) or sequence of these; other values are shared by all samples."""


def apply(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Apply a function to every tensor of the inputs; mappings become dicts."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {key: apply(function, value) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return [apply(function, value) for value in inputs]
    return inputs


def tensors(inputs: Inputs) -> Iterator[Tensor]:
    """Yield every tensor of the inputs."""
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, (Mapping, tuple, list)):
        for value in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from tensors(value)


def take(inputs: Inputs, at: slice, samples: int) -> Inputs:
    """Return a slice of the samples; a tensor of another length is shared by all of them."""
    return apply(lambda t: t[at] if t.shape[:1] == (samples,) else t, inputs)


def place(inputs: Inputs, device: torch.device, dtype: torch.dtype | None) -> Inputs:
    """Detach inputs and move them to a device; cast floating-point ones to ``dtype``."""
    return apply(lambda t: t.detach().to(device, dtype if t.is_floating_point() else t.dtype), inputs)
