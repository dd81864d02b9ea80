"""Storage format of pixels: resized once to uint8, so that training never decodes a file."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

_HEADER = 8  # bytes before the pixels of a row: height and width of the original, 32 bits each
_LONGEST = 16  # aspect ratio beyond which only the visible part of an image is resized


@dataclass(frozen=True)
class PixelFormat:
    """Storage format of an image.

    With ``whole = 0``, an image is stored as its square center of ``side`` pixels, uint8 [3, side, side], for
    both tests and training crops. Otherwise it is a row of bytes with two pictures: the center crop of
    ``size`` pixels exactly as used in tests, and the whole image resized to a square of ``whole`` pixels,
    from which training crops are taken. Channels come last within a row, as in Pillow.

    Attributes:
        side: Shorter side of an image after resizing for a test.
        size: Side of the center crop for tests, if ``whole`` is not 0.
        whole: Side of the square of the whole image for training, or 0.
        only_tested: Omit the second picture, for images that are never trained on.
    """

    side: int
    size: int = 0
    whole: int = 0
    only_tested: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one stored image."""
        if not self.whole:
            return (3, self.side, self.side)
        return (_HEADER + 3 * self.size**2 + (0 if self.only_tested else 3 * self.whole**2),)

    @property
    def key(self) -> str:
        """Identifier of this format in fingerprints of datasets; must never change."""
        return f"Form(side={self.side}, size={self.size}, whole={self.whole}, only_tested={self.only_tested})"

    @property
    def bytes(self) -> int:
        """Size of one stored image."""
        return math.prod(self.shape)

    def encode(self, image: Image.Image) -> Tensor:
        """Return the stored pixels of an image."""
        if not self.whole:
            return center_square(image, self.side)
        header = np.array([image.height, image.width], "<u4").view(np.uint8)
        parts: list[NDArray[np.uint8]] = [header, np.asarray(resized_center(image, self.side, self.size))]
        if not self.only_tested:
            square = image.resize((self.whole, self.whole), Image.Resampling.BICUBIC)
            parts.append(np.asarray(square))
        return torch.from_numpy(np.concatenate([part.ravel() for part in parts]))

    def decode_test(self, rows: Tensor) -> Tensor:
        """Return the test images of stored rows: uint8 [B, 3, size, size]."""
        return _picture(rows, _HEADER, self.size)

    def decode_train(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the square images, uint8 [B, 3, whole, whole], and their original shapes [B, 2]."""
        shapes = rows[:, :_HEADER].cpu().numpy().view("<u4").astype(np.int64)
        return _picture(rows, _HEADER + 3 * self.size**2, self.whole), torch.from_numpy(shapes)


def center_square(image: Image.Image, side: int) -> Tensor:
    """Resize the shorter side to ``side`` (bicubic, antialiased), crop the center: uint8 [3, side, side].

    Only the crop is resampled, so that a very elongated image costs no more than a square one.
    """
    sizes = [max(side, int(side * length / min(image.size))) for length in image.size]
    starts = [round((size - side) / 2) for size in sizes]
    scales = [length / size for length, size in zip(image.size, sizes, strict=True)]
    left, top = (start * scale for start, scale in zip(starts, scales, strict=True))
    ends = zip(starts, scales, image.size, strict=True)
    right, bottom = (min((start + side) * scale, length) for start, scale, length in ends)
    resized = image.resize((side, side), Image.Resampling.BICUBIC, box=(left, top, right, bottom))
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()


def resized_center(image: Image.Image, side: int, size: int) -> Image.Image:
    """Resize the shorter side to ``side`` (bicubic) and crop the center, exactly as torchvision does.

    Of a very elongated image, only the visible part is resized; its values may differ by rounding.
    """
    if max(image.size) > _LONGEST * min(image.size):
        square = center_square(image, side).permute(1, 2, 0).contiguous().numpy()
        return _center(Image.fromarray(square), size)
    sizes = [
        side if length == min(image.size) else int(side * length / min(image.size)) for length in image.size
    ]
    return _center(image.resize((sizes[0], sizes[1]), Image.Resampling.BICUBIC), size)


def _center(image: Image.Image, size: int) -> Image.Image:
    left, top = (round((length - size) / 2) for length in image.size)
    return image.crop((left, top, left + size, top + size))


def _picture(rows: Tensor, start: int, side: int) -> Tensor:
    flat = rows[:, start : start + 3 * side**2]
    return flat.reshape(len(rows), side, side, 3).permute(0, 3, 1, 2)
