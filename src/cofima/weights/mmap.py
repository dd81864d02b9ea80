"""Memory-mapped safetensors files, read and written without holding the whole model in memory.

The operating system may evict the pages of a mapped file under memory pressure, so a model may be larger
than RAM. The format is that of https://github.com/huggingface/safetensors: the length of the header
(8 bytes), the header (JSON), and the bytes of the tensors, back to back.
"""

import errno
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from cofima.core.errors import CofimaError
from cofima.core.system import allocate, write_at
from cofima.weights.ops import Weights

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def spec_of(value: Tensor) -> TensorSpec:
    """Return the dtype and shape of a tensor."""
    return TensorSpec(value.dtype, tuple(value.shape))


def read_mapped(path: Path) -> tuple[Weights, dict[str, str]]:
    """Return the tensors of a safetensors file, memory-mapped, and its metadata."""
    if not path.is_file():
        raise CofimaError(f"{path}: no such file")
    if path.suffix != ".safetensors":
        raise CofimaError(
            f"{path}: not a .safetensors file; read it with torch.load(..., weights_only=True) and "
            "write its state dict with safetensors.torch.save_file"
        )
    try:
        weights = load_file(path)
        with safe_open(path, "pt") as file:
            return weights, dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise CofimaError(f"{path}: truncated, or not a safetensors file ({error})") from error


class MappedFile(dict[str, Tensor]):
    """Writable, memory-mapped tensors of a new file; in-place assignments go to the file.

    Write large tensors with :meth:`put`: the page fault on the first touch of a mapped page costs more than
    writing that page.
    """

    def __init__(self, path: Path, tensors: Weights, places: Mapping[str, int]) -> None:
        super().__init__(tensors)
        self._places = places
        self._file = path.open("r+b", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.clear()  # Windows refuses to replace a file while it is mapped

    def put(self, key: str, first: int, values: Tensor) -> None:
        """Write flat ``values`` into a tensor, starting at element ``first``."""
        content = values.view(torch.uint8).numpy().data
        at = self._places[key] + first * values.itemsize
        write_at(self._file.fileno(), content, at)


def create_mapped(path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> MappedFile:
    """Create a safetensors file of zeros, with its disk space allocated; return its writable tensors."""
    keys = sorted(specs, key=lambda key: (-specs[key].dtype.itemsize, key))  # largest first: all aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    places, end = {}, 0
    for key in keys:
        spec = specs[key]
        places[key] = slice(end, end := end + spec.bytes)
        offsets = [places[key].start, places[key].stop]
        header[key] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data start at a multiple of 8, which views as float64 require
    first = 8 + len(text)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        # A full disk must fail here, with an error: through the mapping it would kill the process.
        allocate(file.fileno(), first + end)
    try:
        whole = torch.from_file(str(path), shared=True, size=first + end, dtype=torch.uint8)[first:]
    except RuntimeError as error:  # torch wraps I/O errors in RuntimeError
        raise OSError(errno.EIO, str(error), str(path)) from error
    tensors = {key: whole[at].view(specs[key].dtype).view(specs[key].shape) for key, at in places.items()}
    return MappedFile(path, tensors, {key: first + at.start for key, at in places.items()})


def write_tensors(path: Path, tensors: Weights, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; the library's own writer leaves a temporary file behind if it is killed."""
    specs = {key: spec_of(value) for key, value in tensors.items()}
    with create_mapped(path, specs, metadata or {}) as file:
        for key, value in tensors.items():
            file.put(key, 0, value.detach().cpu().contiguous().reshape(-1))
