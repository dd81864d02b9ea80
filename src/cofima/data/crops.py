"""Random resized crops of a batch: each image its own box, drawn from one generator."""

import math

import torch
from torch import Tensor
from torch.nn.functional import interpolate

_TRIES = 10
_LEAST_RATIO, _MOST_RATIO = 3 / 4, 4 / 3


def crop_boxes(count: int, side: int, least: float, generator: torch.Generator) -> Tensor:
    """Draw ``count`` boxes (top, left, height, width) within a square of ``side`` pixels: int64 [count, 4].

    The share of the area is uniform in [least, 1], the logarithm of width / height uniform between
    3/4 and 4/3; a shape that does not fit is drawn again, and after ten tries the whole square is taken.
    """
    area, ratio = torch.rand(2, count, _TRIES, generator=generator, dtype=torch.float64)
    place = torch.rand(2, count, generator=generator, dtype=torch.float64)
    area = (least + (1 - least) * area) * side**2
    ratio = torch.exp(math.log(_LEAST_RATIO) + math.log(_MOST_RATIO / _LEAST_RATIO) * ratio)
    heights, widths = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
    fits = (heights <= side) & (widths <= side) & (heights > 0) & (widths > 0)
    first = fits.int().argmax(1, keepdim=True)  # the first that fits; 0 where none does
    whole = ~fits.any(1)
    height = heights.gather(1, first).squeeze(1).masked_fill(whole, side)
    width = widths.gather(1, first).squeeze(1).masked_fill(whole, side)
    top, left = (place * (side + 1 - torch.stack([height, width]))).floor()
    return torch.stack([top, left, height, width], 1).long()


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
