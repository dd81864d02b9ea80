"""Restricted unpickler for CIFAR-100: plain values and arrays of bytes, nothing that could run code."""

import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Kind:
    """Replacement for numpy's ``dtype``, which would trust any state in a file."""

    def __init__(self, code: str = "", *more: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and flags, which bytes do not have."""


class _Array:
    """Replacement for numpy's ``ndarray``, for arrays of bytes only."""

    values: NDArray[np.uint8]

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Kind, bool, bytes | str]) -> None:
        _, shape, kind, by_column, raw = state
        if not isinstance(kind, _Kind) or kind.code != "u1":
            raise pickle.UnpicklingError("an array that is not of bytes")
        content = raw.encode("latin1") if isinstance(raw, str) else raw
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_column else "C")


def _empty(*_: object) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes as {encoding}, not latin1")
    return text.encode("latin1")


ALLOWED = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("numpy.core.multiarray", "_reconstruct"): _empty,  # names in old and new versions of numpy
    ("numpy._core.multiarray", "_reconstruct"): _empty,
    ("_codecs", "encode"): _encode,  # used by Python 3 to write bytes for Python 2
}


class _Plain(pickle.Unpickler):
    """Unpickler that accepts only the names needed for arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which plain data do not need")
        return ALLOWED[module, name]


def plain_dict(content: bytes) -> dict[str, Any]:
    """Return the dictionary in a pickle; raise ValueError if it is not plain data."""
    try:
        found = _Plain(io.BytesIO(content), encoding="latin1").load()
        if not isinstance(found, dict):
            raise pickle.UnpicklingError(f"expected keys and values, found {type(found).__name__}")
        return {key: value.values if isinstance(value, _Array) else value for key, value in found.items()}
    except Exception as error:  # damaged bytes may raise anything
        raise ValueError(str(error) or type(error).__name__) from error
