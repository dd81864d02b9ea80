"""Labelled images in memory, and how a file becomes one of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from cofima.errors import CofimaError

MOST_PIXELS = 100_000_000
_HASHED_AT_ONCE = 1024


class Images(Protocol):
    """Labelled images that can be taken a batch at a time, however they are kept."""

    def __len__(self) -> int: ...

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the uint8 pixels and the labels at ``index``."""
        ...


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images of one fixed size, decoded once, kept as uint8.

    Sets cut from one dataset share ``pixels`` [M, 3, H, W]; ``rows`` says which of them are this set's.
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
        """Return the images at these positions (or where the mask is true); no pixel is copied."""
        return ImageSet(self.pixels, self.rows[index_or_mask], self.labels[index_or_mask])

    def named(self) -> list[tuple[int, int]]:
        """Return where each image is stored, and its label."""
        return list(zip(self.rows.tolist(), self.labels.tolist(), strict=True))

    def counts(self) -> dict[int, int]:
        """Return the number of images of each label that occurs."""
        return dict(sorted(Counter(self.labels.tolist()).items()))

    def fingerprint(self) -> str:
        """Return a hash of the images and labels in order, whichever way they are stored."""
        digest = sha256(str((len(self), *self.pixels.shape[1:])).encode())
        digest.update(self.labels.numpy().tobytes())
        for start in range(0, len(self), _HASHED_AT_ONCE):
            rows = self.rows[start : start + _HASHED_AT_ONCE]
            digest.update(self.pixels[rows].contiguous().numpy().data)
        return digest.hexdigest()


def join(sets: Sequence[ImageSet]) -> ImageSet:
    """Return one set with the images of all ``sets``, which must share their pixels."""
    pixels = sets[0].pixels
    if any(one.pixels is not pixels for one in sets):
        raise ValueError("only sets cut from the same pixels can be joined")
    return ImageSet(pixels, torch.cat([one.rows for one in sets]), torch.cat([one.labels for one in sets]))


class BadImageError(CofimaError):
    """An image file that cannot be used, and why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


def decode(path: Path, content: bytes | None = None) -> Image.Image:
    """Return the image (the first frame of several) as 8-bit RGB, upright, on white where transparent.

    ``content`` is what the file holds, if it has been read already.
    """
    try:
        content = path.read_bytes() if content is None else content
        with Image.open(BytesIO(content)) as image:
            if image.width * image.height > MOST_PIXELS:
                raise BadImageError(path, f"{image.width} x {image.height} is more than 100 million pixels")
            image.load()
            return as_rgb(image)
    except BadImageError:
        raise
    except Exception as error:  # what a decoder raises on damaged bytes is not limited to OSError
        raise BadImageError(path, _reason(content, error)) from error


def as_rgb(image: Image.Image) -> Image.Image:
    """Return an image as 8-bit RGB, upright, on white where it is transparent."""
    return _rgb(_upright(image))


def fit(image: Image.Image, side: int) -> Tensor:
    """Resize the shorter side to ``side`` (bicubic, antialiased), crop the centre: uint8 [3, side, side].

    Only the crop is resampled, so that a very long image costs no more than a square one.
    """
    sizes = [max(side, int(side * length / min(image.size))) for length in image.size]
    starts = [round((size - side) / 2) for size in sizes]
    scales = [length / size for length, size in zip(image.size, sizes, strict=True)]
    left, top = (start * scale for start, scale in zip(starts, scales, strict=True))
    ends = zip(starts, scales, image.size, strict=True)
    right, bottom = (min((start + side) * scale, length) for start, scale, length in ends)
    resized = image.resize((side, side), Image.Resampling.BICUBIC, box=(left, top, right, bottom))
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # broken EXIF data does not make the picture unreadable
        return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode[0] in "IF":
        return Image.fromarray(_eight_bit(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _eight_bit(grey: NDArray[Any]) -> NDArray[np.uint8]:
    """Scale 16-bit integers and floats in 0..1 by their range, anything larger by its own maximum."""
    values = np.nan_to_num(grey.astype(np.float64)).clip(0)
    white = 65535.0 if np.issubdtype(grey.dtype, np.integer) else 1.0
    eight_bit: NDArray[np.uint8] = np.rint(values * (255.0 / max(white, values.max()))).astype(np.uint8)
    return eight_bit


def _reason(content: bytes | None, error: Exception) -> str:
    if content == b"":
        return "empty file"
    if isinstance(error, Image.DecompressionBombError):
        return "more than 100 million pixels"
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or of an unknown format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = str(error)
    return "truncated" if "truncated" in text.lower() else f"damaged ({text or type(error).__name__})"
