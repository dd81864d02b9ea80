"""Shared helpers for functions on state dicts: common keys, chunks, scratch memory, snapshots."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from cofima.core.errors import problems

Weights = dict[str, Tensor]

CHUNK = 131_072  # elements: small enough for a core's cache, large enough to amortize call overhead


def shared_keys(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> list[str]:
    """Return the floating-point keys of both, in the order of ``new``; raise if keys or shapes conflict."""
    wrong = [f"'{key}': only the old weights have it" for key in old if key not in new]
    for key in new:
        if key in old and old[key].shape != new[key].shape:
            wrong.append(f"'{key}': old shape {list(old[key].shape)}, new shape {list(new[key].shape)}")
    if wrong:
        raise problems("the pair of weights", wrong)
    return [key for key, value in new.items() if key in old and value.is_floating_point()]


def compute_dtype(value: Tensor) -> torch.dtype:
    """Return float64 for float64 and float32 otherwise: half precision is averaged in float32."""
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def chunks(value: Tensor, size: int = CHUNK) -> Iterator[slice]:
    """Yield cache-sized slices of a flat CPU tensor; a single slice for a tensor on a GPU."""
    size = size if value.device.type == "cpu" else max(value.numel(), 1)
    for start in range(0, value.numel(), size):
        yield slice(start, start + size)


class Scratch:
    """A reusable buffer for temporary results."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def like(self, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return uninitialized memory with the size, device and dtype of a flat ``value``."""
        dtype, there = dtype or value.dtype, self._memory
        if there.numel() < value.numel() or (there.dtype, there.device) != (dtype, value.device):
            self._memory = torch.empty_like(value, dtype=dtype)
        return self._memory[: value.numel()]


def first_rows(weights: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Weights:
    """Return views of the weights in ``like``; of a weight that has grown, only its original rows."""
    return {key: weights[key][: len(old)] if old.ndim else weights[key] for key, old in like.items()}


def snapshot(module: nn.Module) -> Weights:
    """Return a copy of a module's parameters and buffers."""
    return {key: value.detach().clone() for key, value in module.state_dict().items()}
