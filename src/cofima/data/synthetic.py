"""Tiny synthetic images that are easy to tell apart: what tests and quick trials learn."""

import colorsys
import math

import torch
from torch import Tensor

from cofima.data.images import ImageSet
from cofima.data.splits import by_row, split_facts
from cofima.data.stream import Dataset
from cofima.seeds import Seeds

# multiples of an irrational number spread evenly over a circle, whatever the number of classes
_HUE, _TURN = (math.sqrt(5) - 1) / 2, math.sqrt(2)


def blobs(classes: int = 6, per_class: int = 20, side: int = 16, seed: int = 0) -> Dataset:
    """Return images of one coloured blob on noise; the class is its colour and its place.

    Each class has ``per_class`` training images and half as many test images.
    """
    tested = max(1, per_class // 2)
    each = per_class + tested
    generator = Seeds(seed).generator("blobs")
    pixels = torch.cat([_draw(label, each, side, generator) for label in range(classes)])
    labels = torch.arange(classes).repeat_interleave(each)
    rows = torch.arange(classes * each)
    training = rows % each < per_class
    facts = {"train": classes * per_class, "test": classes * tested, "split": "generated", "split_seed": seed}
    everything = ImageSet(pixels, rows, labels)
    names = tuple(f"blob {label}" for label in range(classes))
    train, test = everything.select(training), everything.select(~training)
    facts["fingerprint"] = everything.fingerprint()
    facts |= split_facts(f"blobs:seed{seed}", by_row(train), by_row(test))
    return Dataset("blobs", names, train, test, flip=False, crop=1.0, facts=facts)


def _draw(label: int, count: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` images of one class: uint8 [count, 3, side, side]."""
    turn = 2 * math.pi * label * _TURN
    place = torch.tensor([math.sin(turn), math.cos(turn)]) * 0.3 + 0.5
    centre = place + 0.02 * torch.randn(count, 2, generator=generator)
    steps = (torch.arange(side) + 0.5) / side
    rows, columns = ((steps - centre[:, axis, None]) ** 2 for axis in (0, 1))
    blob = torch.exp(-(rows[:, :, None] + columns[:, None, :]) / (2 * 0.12**2))
    colour = torch.tensor(colorsys.hsv_to_rgb(label * _HUE % 1, 1.0, 1.0)).view(1, 3, 1, 1)
    noise = 0.08 * torch.randn(count, 3, side, side, generator=generator)
    brightness = 0.25 + 0.7 * blob[:, None] * (colour - 0.25) + noise
    return (255 * brightness).clamp(0, 255).round().to(torch.uint8)
