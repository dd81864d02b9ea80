"""How stored pixels become what a network sees, a batch at a time."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cofima.data.crops import brightened, crop_and_resize, crop_boxes, random_windows, resize, scaled_boxes
from cofima.data.loading.pixel_format import PixelFormat
from cofima.ranks import Part, all_of

INTERPOLATIONS = ("bicubic", "bilinear")
Colour = tuple[float, float, float]


def stored_side(size: int, crop_pct: float) -> int:
    """Return the side at which images are stored for a network that sees ``size`` pixels of them."""
    return math.floor(size / crop_pct)


@dataclass(frozen=True)
class View:
    """Turn uint8 images, as they are stored, into normalised float32 [B, 3, size, size].

    Attributes:
        stored: The shorter side of an image when it is resized for a test, before the center is cut out.
        flip: Mirror half of the training images.
        crop: Least share of the area that a random training crop keeps; 1.0 is no random crop.
        interpolation: How random crops are resized; for tests it is always bicubic.
        preset: Whose transforms these are: ``timm``, ``slca`` or ``pilot``.
        whole: The side of the square that a whole image is squeezed into for training, or 0.
        window: Cut training images of ``size`` pixels out of that square, instead of crops of any size.
        brightness: Training images become brighter or darker by at most this share.
        shape: Height and width of images that are stored small, as they are; none is the square of
            ``stored`` pixels, or rows of a pixel format with ``whole``.
    """

    size: int
    stored: int
    mean: Colour
    std: Colour
    flip: bool = False
    crop: float = 1.0
    interpolation: str = "bicubic"
    preset: str = "timm"
    whole: int = 0
    window: bool = False
    brightness: float = 0.0
    shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.stored < self.size:
            raise ValueError(f"images stored at {self.stored} px cannot fill a view of {self.size} px")
        if self.window and self.whole < self.size:
            raise ValueError(f"whole = {self.whole}: too small to cut windows of {self.size} px from")
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop = {self.crop}: must be above 0 and at most 1")
        if not 0 <= self.brightness <= 1:
            raise ValueError(f"brightness = {self.brightness}: must lie between 0 and 1")
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(
                f"interpolation = '{self.interpolation}': must be one of {', '.join(INTERPOLATIONS)}"
            )

    @property
    def form(self) -> PixelFormat:
        """Return how images must be stored to be seen through this view."""
        return PixelFormat(self.stored, self.size, self.whole)

    def test(self, pixels: Tensor) -> Tensor:
        """Resize, crop the center and normalise, on the device of ``pixels``.

        Squares of ``stored`` pixels are accepted whatever the form of the training images.
        """
        return self._normalised(self._center(pixels))

    def train(self, pixels: Tensor, generator: torch.Generator, part: Part | None = None) -> Tensor:
        """Crop, mirror and brighten each image by chance, then normalise.

        All chance comes from the CPU ``generator``: the same on every device. These images may be a ``part``
        of a batch; then each is varied as it would be if all of the batch were here.
        """
        part = part or all_of(len(pixels))
        images = self._cropped(pixels, generator, part)
        if self.flip:
            mirrored = (part.rand(generator=generator) < 0.5).to(pixels.device)
            images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        if self.brightness:
            factor = 1 + self.brightness * (2 * part.rand(generator=generator) - 1)
            images = brightened(images, factor)
        return self._normalised(images)

    def _cropped(self, pixels: Tensor, generator: torch.Generator, part: Part) -> Tensor:
        self._check(pixels)
        if self.window:
            squares = self.form.trained(pixels)[0] if pixels.ndim == 2 else pixels
            return random_windows(resize(squares, self.whole, self.whole), self.size, generator, part)
        if self.crop == 1:
            return self._center(pixels)
        if pixels.ndim == 2:
            pixels, shapes = self.form.trained(pixels)
            boxes = scaled_boxes(crop_boxes(shapes, self.crop, generator, part), shapes, self.whole)
        else:
            shapes = torch.tensor(pixels.shape[2:]).expand(len(pixels), 2)
            boxes = crop_boxes(shapes, self.crop, generator, part)
        return crop_and_resize(pixels, boxes, self.size, self.interpolation)

    def _center(self, pixels: Tensor) -> Tensor:
        self._check(pixels, tested=True)
        if pixels.ndim == 2:
            return self.form.tested(pixels)
        shorter = min(pixels.shape[2:])
        height, width = (max(self.stored, int(self.stored * side / shorter)) for side in pixels.shape[2:])
        top, left = round((height - self.size) / 2), round((width - self.size) / 2)
        return resize(pixels, height, width)[:, :, top : top + self.size, left : left + self.size]

    def _normalised(self, images: Tensor) -> Tensor:
        mean, std = (torch.tensor(c, device=images.device).view(3, 1, 1) for c in (self.mean, self.std))
        images = images.to(torch.float32, memory_format=torch.channels_last)  # convolutions are faster so
        return images.sub_(255 * mean).div_(255 * std)

    def _check(self, pixels: Tensor, tested: bool = False) -> None:
        square = (3, self.stored, self.stored)
        shape = self.form.shape if self.shape is None else (3, *self.shape)
        known = {shape}
        if tested:
            known |= {square, replace(self.form, only_tested=True).shape}
        if pixels.dtype != torch.uint8 or tuple(pixels.shape[1:]) not in known:
            shapes = " or ".join(str(["B", *one]).replace("'", "") for one in sorted(known, key=len))
            raise ValueError(f"expected uint8 {shapes}, got {pixels.dtype} {tuple(pixels.shape)}")
