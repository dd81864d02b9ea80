"""A dataset whose images are found and listed, before any of them is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Picture:
    """An image that is not read yet."""

    name: str  # the same on every machine, e.g. its path below the dataset's folder
    label: int
    read: Callable[[], bytes | NDArray[np.uint8]]  # the encoded file, or pixels [H, W, 3]


@dataclass(frozen=True, eq=False)
class Source:
    """A dataset whose images are found but not read."""

    name: str
    variant: str  # e.g. "official", "pilot", "80/20 seed 0"
    class_names: tuple[str, ...]
    train: Sequence[Picture]
    test: Sequence[Picture]
    flip: bool
    crop: float
    facts: dict[str, Any]
