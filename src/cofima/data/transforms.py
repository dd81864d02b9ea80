"""Batched transforms from stored pixels to network inputs, and presets of published code."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import interpolate

from cofima.core.distributed import Shard, full_shard
from cofima.data.loading.pixel_format import PixelFormat
from cofima.data.options import Preset

Color = tuple[float, float, float]
MOST_PIXELS = 16_384
# validated when a view is read from a file
Pixels = Annotated[int, Field(ge=1, le=MOST_PIXELS)]
Level = Annotated[float, Field(allow_inf_nan=False)]
Spread = Annotated[float, Field(gt=0, allow_inf_nan=False)]
IMAGENET: tuple[Color, Color] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# training transforms per dataset in SLCA's code, which CoFiMA uses, too
_CROPS, _WINDOWS = {"crop": 0.08}, {"window": True}
_CIFAR = {"mean": (0.5071, 0.4867, 0.4408), "std": (0.2675, 0.2565, 0.2761), "brightness": 63 / 255}
_SLCA: dict[str, dict[str, Any]] = {
    "cifar100": _CROPS | _CIFAR,
    "imagenet_r": _CROPS,
    "cub200": _WINDOWS,
    "cars196": _WINDOWS,
    "vtab": _WINDOWS,
}
PAPER_DATASETS = tuple(_SLCA)
_TRIES = 10  # number of tries of torchvision's RandomResizedCrop, and its aspect ratios
_LEAST_RATIO, _MOST_RATIO = 3 / 4, 4 / 3


@dataclass(frozen=True)
class View:
    """Transform from stored uint8 images to normalized float32 [B, 3, size, size].

    Attributes:
        size: Side of the network's input.
        stored: Shorter side of an image after resizing for a test, before the center crop.
        mean: Mean of each color channel, for normalization.
        std: Standard deviation of each color channel.
        flip: Mirror half of the training images.
        crop: Minimum share of the area that a random training crop keeps; 1.0 disables random crops.
        interpolation: Interpolation of random crops; for tests it is always bicubic.
        preset: Preset that these transforms belong to: ``timm``, ``slca`` or ``pilot``.
        whole: Side of the square to which the whole image is resized for training, or 0.
        window: Crop training images of ``size`` pixels from that square, instead of random sizes.
        brightness: Maximum relative change of brightness of training images.
        shape: Height and width of small images, which are stored unchanged; None for squares of ``stored``
            pixels, or for rows of a pixel format with ``whole``.
    """

    size: Pixels
    stored: Pixels
    mean: tuple[Level, Level, Level]
    std: tuple[Spread, Spread, Spread]
    flip: bool = False
    crop: float = 1.0
    interpolation: str = "bicubic"
    preset: str = "timm"
    whole: Annotated[int, Field(ge=0, le=MOST_PIXELS)] = 0
    window: bool = False
    brightness: Annotated[float, Field(ge=0, le=1)] = 0.0
    shape: tuple[Pixels, Pixels] | None = None

    def __post_init__(self) -> None:
        if self.stored < self.size:
            raise ValueError(f"images stored at {self.stored} px cannot fill a view of {self.size} px")
        if self.window and self.whole < self.size:
            raise ValueError(f"whole = {self.whole}: too small to cut windows of {self.size} px from")
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop = {self.crop}: must be above 0 and at most 1")

    @property
    def pixel_format(self) -> PixelFormat:
        """Format in which images must be stored for this view."""
        return PixelFormat(self.stored, self.size, self.whole)

    def test(self, pixels: Tensor) -> Tensor:
        """Resize, crop the center and normalize, on the device of ``pixels``.

        Squares of ``stored`` pixels are accepted regardless of the format of training images.
        """
        return self._normalized(self._center(pixels))

    def train(self, pixels: Tensor, generator: torch.Generator, part: Shard | None = None) -> Tensor:
        """Randomly crop, mirror and brighten each image, then normalize.

        All random numbers come from the CPU ``generator``, so that they are the same on every device. The
        images may be a shard, ``part``, of a batch; each is augmented as in the whole batch.
        """
        part = part or full_shard(len(pixels))
        images = self._cropped(pixels, generator, part)
        if self.flip:
            mirrored = (part.rand(generator=generator) < 0.5).to(pixels.device)
            images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        if self.brightness:
            factor = 1 + self.brightness * (2 * part.rand(generator=generator) - 1)
            images = brightened(images, factor)
        return self._normalized(images)

    def _cropped(self, pixels: Tensor, generator: torch.Generator, part: Shard) -> Tensor:
        self._check(pixels)
        if self.window:
            squares = self.pixel_format.decode_train(pixels)[0] if pixels.ndim == 2 else pixels
            return random_windows(resize(squares, self.whole, self.whole), self.size, generator, part)
        if self.crop == 1:
            return self._center(pixels)
        if pixels.ndim == 2:
            pixels, shapes = self.pixel_format.decode_train(pixels)
            boxes = scaled_boxes(crop_boxes(shapes, self.crop, generator, part), shapes, self.whole)
        else:
            shapes = torch.tensor(pixels.shape[2:]).expand(len(pixels), 2)
            boxes = crop_boxes(shapes, self.crop, generator, part)
        return crop_and_resize(pixels, boxes, self.size, self.interpolation)

    def _center(self, pixels: Tensor) -> Tensor:
        self._check(pixels, tested=True)
        if pixels.ndim == 2:
            return self.pixel_format.decode_test(pixels)
        shorter = min(pixels.shape[2:])
        height, width = (max(self.stored, int(self.stored * side / shorter)) for side in pixels.shape[2:])
        top, left = round((height - self.size) / 2), round((width - self.size) / 2)
        return resize(pixels, height, width)[:, :, top : top + self.size, left : left + self.size]

    def _normalized(self, images: Tensor) -> Tensor:
        mean, std = (torch.tensor(c, device=images.device).view(3, 1, 1) for c in (self.mean, self.std))
        images = images.to(torch.float32, memory_format=torch.channels_last)  # faster for convolutions
        return images.sub_(255 * mean).div_(255 * std)

    def _check(self, pixels: Tensor, tested: bool = False) -> None:
        square = (3, self.stored, self.stored)
        shape = self.pixel_format.shape if self.shape is None else (3, *self.shape)
        known = {shape}
        if tested:
            known |= {square, replace(self.pixel_format, only_tested=True).shape}
        if pixels.dtype != torch.uint8 or tuple(pixels.shape[1:]) not in known:
            shapes = " or ".join(str(["B", *one]).replace("'", "") for one in sorted(known, key=len))
            raise ValueError(f"expected uint8 {shapes}, got {pixels.dtype} {tuple(pixels.shape)}")


def choose_preset(asked: Preset | None, dataset: str) -> Preset:
    """Return the requested preset; by default ``slca`` for datasets of the paper, and ``timm`` for others."""
    return asked or ("slca" if dataset in PAPER_DATASETS else "timm")


def preset_view(preset: Preset, dataset: str, own: View) -> View:
    """Return the view of a dataset under a preset, for images stored in :attr:`View.pixel_format`.

    ``own`` has the normalization and sizes of the backbone and the augmentation of the dataset: this is the
    preset ``timm``. The others only use its image size. No preset mirrors images of a dataset in which
    mirroring changes the class.
    """
    if preset == "timm":
        return own
    stored, whole = own.size * 256 // 224, round(own.size * 300 / 224)
    plain = View(own.size, stored, *IMAGENET, flip=own.flip, preset=preset, whole=whole)
    if preset == "pilot":
        return replace(plain, mean=(0.0,) * 3, std=(1.0,) * 3, crop=0.05, interpolation="bilinear")
    return replace(plain, **_SLCA.get(dataset, _WINDOWS))


def override(view: View, flip: bool | None, crop: float | None) -> View:
    """Apply the user's settings over a preset; a given ``crop`` enables random crops of varying size."""
    if flip is not None:
        view = replace(view, flip=flip)
    return view if crop is None else replace(view, crop=crop, window=False)


def crop_boxes(shapes: Tensor, least: float, generator: torch.Generator, part: Shard | None = None) -> Tensor:
    """Draw a box (top, left, height, width) within each height and width of ``shapes``: int64 [B, 4].

    As in torchvision's RandomResizedCrop, the share of the area is uniform in [least, 1], and the logarithm
    of width / height is uniform between those of 3/4 and 4/3; a box that does not fit is drawn again, and
    after ten tries the largest center crop of a permitted ratio is taken. The images may be a shard,
    ``part``, of a batch; the box of an image is the same as in the whole batch.
    """
    full = shapes.double()
    part = part or full_shard(len(full))
    area, ratio = part.rand(2, _TRIES, dim=1, generator=generator, dtype=torch.float64)
    place = part.rand(2, dim=1, generator=generator, dtype=torch.float64)
    area = (least + (1 - least) * area) * full.prod(1, keepdim=True)
    ratio = torch.exp(math.log(_LEAST_RATIO) + math.log(_MOST_RATIO / _LEAST_RATIO) * ratio)
    sides = torch.stack([(area / ratio).sqrt().round(), (area * ratio).sqrt().round()], 2)
    fits = ((sides <= full[:, None]) & (sides > 0)).all(2)
    first = fits.int().argmax(1)  # the first that fits; 0 if none does
    drawn = sides[torch.arange(len(full)), first]
    start = (place.T * (full + 1 - drawn)).floor()
    none = ~fits.any(1, keepdim=True)
    center = _largest(full)
    drawn = torch.where(none, center, drawn)
    start = torch.where(none, ((full - center) / 2).floor(), start)
    return torch.cat([start, drawn], 1).long()


def scaled_boxes(boxes: Tensor, shapes: Tensor, side: int) -> Tensor:
    """Scale boxes within images of ``shapes`` to these images resized to squares of ``side``, rounded."""
    scale = side / shapes.double()
    start = (boxes[:, :2] * scale).round()
    end = ((boxes[:, :2] + boxes[:, 2:]) * scale).round()
    start = torch.minimum(start, torch.tensor(side - 1.0, dtype=torch.float64))
    return torch.cat([start, (end - start).clamp_(min=1)], 1).long()


def crop_and_resize(pixels: Tensor, boxes: Tensor, size: int, interpolation: str) -> Tensor:
    """Crop each image to its box and resize it with antialiasing: [B, 3, size, size], values in 0..255.

    On a CPU, one call per image is faster than any batched version with antialiasing.
    """
    if pixels.device.type != "cpu":
        pixels = pixels.float()  # only the CPU resizes 8-bit images, with the same rounding as Pillow
    crops = [
        interpolate(
            image[None, :, top : top + height, left : left + width],
            size=(size, size),
            mode=interpolation,
            antialias=True,
        )
        for image, (top, left, height, width) in zip(pixels, boxes.tolist(), strict=True)
    ]
    return torch.cat(crops).clamp_(0, 255) if crops else pixels.new_empty(0, 3, size, size)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize a batch (bicubic, antialiased), with values rounded to integers in 0..255."""
    if pixels.shape[2:] == (height, width) or not len(pixels):
        return pixels.new_empty(0, 3, height, width) if not len(pixels) else pixels
    images = pixels if pixels.device.type == "cpu" else pixels.float()
    return interpolate(images, size=(height, width), mode="bicubic", antialias=True).round_().clamp_(0, 255)


def random_windows(
    pixels: Tensor, size: int, generator: torch.Generator, part: Shard | None = None
) -> Tensor:
    """Crop a square of ``size`` pixels from each image, at a uniformly random position."""
    part = part or full_shard(len(pixels))
    room = torch.tensor(pixels.shape[2:]) - size + 1
    places = (part.rand(2, generator=generator, dtype=torch.float64) * room).floor().long()
    windows = [
        image[:, top : top + size, left : left + size]
        for image, (top, left) in zip(pixels, places.tolist(), strict=True)
    ]
    return torch.stack(windows) if windows else pixels.new_empty(0, 3, size, size)


def brightened(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply each image by its factor, rounded down to 8 bits, as Pillow and torchvision do."""
    lit = [(image * f).clamp_(max=255).byte() for image, f in zip(images, factors.tolist(), strict=True)]
    return torch.stack(lit) if lit else images


def _largest(full: Tensor) -> Tensor:
    """Return the largest height and width with a permitted aspect ratio within each image."""
    height, width = full.unbind(1)
    flat, tall = width / height > _MOST_RATIO, width / height < _LEAST_RATIO
    return torch.stack(
        [
            torch.where(tall, (width / _LEAST_RATIO).round(), height),
            torch.where(flat, (height * _MOST_RATIO).round(), width),
        ],
        1,
    )
