"""How stored pixels become what a network sees, a batch at a time."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cofima.data.crops import crop_and_resize, crop_boxes

INTERPOLATIONS = ("bicubic", "bilinear")
Colour = tuple[float, float, float]


def stored_side(size: int, crop_pct: float) -> int:
    """Return the side at which images are stored for a network that sees ``size`` pixels of them."""
    return math.floor(size / crop_pct)


@dataclass(frozen=True)
class View:
    """Turn uint8 [B, 3, stored, stored] into normalised float32 [B, 3, size, size].

    Attributes:
        flip: Mirror half of the training images.
        crop: Least share of the area that a random training crop keeps; 1.0 is no random crop.
    """

    size: int
    stored: int
    mean: Colour
    std: Colour
    flip: bool = False
    crop: float = 1.0
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        if self.stored < self.size:
            raise ValueError(f"images stored at {self.stored} px cannot fill a view of {self.size} px")
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop = {self.crop}: must be above 0 and at most 1")
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(
                f"interpolation = '{self.interpolation}': must be one of {', '.join(INTERPOLATIONS)}"
            )

    def test(self, pixels: Tensor) -> Tensor:
        """Crop the centre and normalise, on the device of ``pixels``."""
        self._check(pixels)
        return self._normalised(self._centre(pixels))

    def train(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """Crop and mirror each image by chance, then normalise.

        All chance comes from the CPU ``generator``: the same on every device.
        """
        self._check(pixels)
        if self.crop < 1:
            boxes = crop_boxes(len(pixels), self.stored, self.crop, generator)
            images = crop_and_resize(pixels, boxes, self.size, self.interpolation)
        else:
            images = self._centre(pixels)
        if self.flip:
            mirrored = (torch.rand(len(pixels), generator=generator) < 0.5).to(pixels.device)
            images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        return self._normalised(images)

    def _centre(self, pixels: Tensor) -> Tensor:
        start = round((self.stored - self.size) / 2)
        end = start + self.size
        return pixels[:, :, start:end, start:end]

    def _normalised(self, images: Tensor) -> Tensor:
        mean, std = (torch.tensor(c, device=images.device).view(3, 1, 1) for c in (self.mean, self.std))
        images = images.to(torch.float32, memory_format=torch.channels_last)  # convolutions are faster so
        return images.sub_(255 * mean).div_(255 * std)

    def _check(self, pixels: Tensor) -> None:
        if pixels.dtype != torch.uint8 or pixels.shape[1:] != (3, self.stored, self.stored):
            shape = tuple(pixels.shape)
            raise ValueError(
                f"expected uint8 [B, 3, {self.stored}, {self.stored}], got {pixels.dtype} {shape}"
            )
