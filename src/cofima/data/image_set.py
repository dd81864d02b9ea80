"""Labeled images in memory, and subsets that share their pixels."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import torch
from torch import Tensor

_HASHED_AT_ONCE = 1024


class Images(Protocol):
    """Interface of labeled images that are read in batches."""

    def __len__(self) -> int: ...

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the uint8 pixels and the labels at ``index``."""
        ...


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labeled images of one fixed size, decoded once and stored as uint8.

    Subsets of one dataset share ``pixels`` [M, 3, H, W]; ``rows`` are the indices of this set's images.
    """

    pixels: Tensor
    rows: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pixels and labels at ``index``."""
        return self.pixels[self.rows[index]], self.labels[index]

    def select(self, index_or_mask: Tensor) -> "ImageSet":
        """Return the subset at these positions (or where the mask is true), without copying pixels."""
        return ImageSet(self.pixels, self.rows[index_or_mask], self.labels[index_or_mask])

    def rows_and_labels(self) -> list[tuple[int, int]]:
        """Return the row in ``pixels`` and the label of each image."""
        return list(zip(self.rows.tolist(), self.labels.tolist(), strict=True))

    def counts(self) -> dict[int, int]:
        """Return the number of images per label that occurs."""
        return dict(sorted(Counter(self.labels.tolist()).items()))

    def fingerprint(self) -> str:
        """Return a hash of the images and labels in order, independent of how they are stored."""
        digest = sha256(str((len(self), *self.pixels.shape[1:])).encode())
        digest.update(self.labels.numpy().tobytes())
        for start in range(0, len(self), _HASHED_AT_ONCE):
            rows = self.rows[start : start + _HASHED_AT_ONCE]
            digest.update(self.pixels[rows].contiguous().numpy().data)
        return digest.hexdigest()


def join(sets: Sequence[ImageSet]) -> ImageSet:
    """Return one set with the images of all ``sets``, which must share their pixels; copies nothing."""
    pixels = sets[0].pixels
    if any(one.pixels is not pixels for one in sets):
        raise ValueError("only sets cut from the same pixels can be joined")
    return ImageSet(pixels, torch.cat([one.rows for one in sets]), torch.cat([one.labels for one in sets]))


def image_set(pixels: Tensor, labels: Tensor) -> ImageSet:
    """Return a set of all images in ``pixels``."""
    return ImageSet(pixels, torch.arange(len(labels)), labels)


def concatenate(*sets: ImageSet) -> ImageSet:
    """Copy the images of ``sets`` into one set with its own pixels; see :func:`join` to avoid the copy."""
    pixels = torch.cat([one.pixels[one.rows] for one in sets])
    return image_set(pixels, torch.cat([one.labels for one in sets]))
