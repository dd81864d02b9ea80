"""Random crops of a batch, and their light: each image its own, drawn from one generator."""

import math

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from cofima.ranks import Part, all_of

_TRIES = 10
_LEAST_RATIO, _MOST_RATIO = 3 / 4, 4 / 3


def crop_boxes(shapes: Tensor, least: float, generator: torch.Generator, part: Part | None = None) -> Tensor:
    """Draw a box (top, left, height, width) within each height and width of ``shapes``: int64 [B, 4].

    As torchvision's RandomResizedCrop: the share of the area is uniform in [least, 1], the logarithm
    of width / height uniform between 3/4 and 4/3; a shape that does not fit is drawn again, and after
    ten tries the largest center of a permitted ratio is taken. These may be a ``part`` of a batch: what is
    drawn for an image is the same.
    """
    full = shapes.double()
    part = part or all_of(len(full))
    area, ratio = part.rand(2, _TRIES, dim=1, generator=generator, dtype=torch.float64)
    place = part.rand(2, dim=1, generator=generator, dtype=torch.float64)
    area = (least + (1 - least) * area) * full.prod(1, keepdim=True)
    ratio = torch.exp(math.log(_LEAST_RATIO) + math.log(_MOST_RATIO / _LEAST_RATIO) * ratio)
    sides = torch.stack([(area / ratio).sqrt().round(), (area * ratio).sqrt().round()], 2)
    fits = ((sides <= full[:, None]) & (sides > 0)).all(2)
    first = fits.int().argmax(1)  # the first that fits; 0 where none does
    drawn = sides[torch.arange(len(full)), first]
    start = (place.T * (full + 1 - drawn)).floor()
    none = ~fits.any(1, keepdim=True)
    center = _largest(full)
    drawn = torch.where(none, center, drawn)
    start = torch.where(none, ((full - center) / 2).floor(), start)
    return torch.cat([start, drawn], 1).long()


def scaled_boxes(boxes: Tensor, shapes: Tensor, side: int) -> Tensor:
    """Return boxes within ``shapes`` as boxes, in whole pixels, within these images squeezed to ``side``."""
    scale = side / shapes.double()
    start = (boxes[:, :2] * scale).round()
    end = ((boxes[:, :2] + boxes[:, 2:]) * scale).round()
    start = torch.minimum(start, torch.tensor(side - 1.0, dtype=torch.float64))
    return torch.cat([start, (end - start).clamp_(min=1)], 1).long()


def crop_and_resize(pixels: Tensor, boxes: Tensor, size: int, interpolation: str) -> Tensor:
    """Cut each image's box out and resize it with antialiasing: [B, 3, size, size] with values in 0..255.

    One call per image is faster on a CPU than any batched form that also antialiases.
    """
    if pixels.device.type != "cpu":
        pixels = pixels.float()  # only the CPU resizes 8-bit images, and rounds as Pillow does
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
    """Resize a whole batch (bicubic, antialiased), rounded to the 256 values that a picture has."""
    if pixels.shape[2:] == (height, width) or not len(pixels):
        return pixels.new_empty(0, 3, height, width) if not len(pixels) else pixels
    images = pixels if pixels.device.type == "cpu" else pixels.float()
    return interpolate(images, size=(height, width), mode="bicubic", antialias=True).round_().clamp_(0, 255)


def random_windows(pixels: Tensor, size: int, generator: torch.Generator, part: Part | None = None) -> Tensor:
    """Cut a square of ``size`` pixels out of each image, any place as likely as any other."""
    part = part or all_of(len(pixels))
    room = torch.tensor(pixels.shape[2:]) - size + 1
    places = (part.rand(2, generator=generator, dtype=torch.float64) * room).floor().long()
    windows = [
        image[:, top : top + size, left : left + size]
        for image, (top, left) in zip(pixels, places.tolist(), strict=True)
    ]
    return torch.stack(windows) if windows else pixels.new_empty(0, 3, size, size)


def brightened(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply each image by its factor, rounded down to the 256 values, as Pillow and torchvision do."""
    lit = [(image * f).clamp_(max=255).byte() for image, f in zip(images, factors.tolist(), strict=True)]
    return torch.stack(lit) if lit else images


def _largest(full: Tensor) -> Tensor:
    """Return the largest height and width of a permitted ratio within each image."""
    height, width = full.unbind(1)
    flat, tall = width / height > _MOST_RATIO, width / height < _LEAST_RATIO
    return torch.stack(
        [
            torch.where(tall, (width / _LEAST_RATIO).round(), height),
            torch.where(flat, (height * _MOST_RATIO).round(), width),
        ],
        1,
    )
