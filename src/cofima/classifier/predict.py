"""Predictions for images: the most likely classes with calibrated probabilities, or "unknown"."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cofima.classifier.calibrate import farthest
from cofima.classifier.scoring import gaussians_of, logits_of_features, to_probabilities
from cofima.core.errors import CofimaError
from cofima.data.loading.loader import ImageLike, decode_all
from cofima.data.loading.pixel_format import PixelFormat
from cofima.store.model import Model

BATCH = 32
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image.

    Attributes:
        image: Path of the file, or the index of an in-memory image.
        best: Pairs (class, probability), most likely first; empty if the image could not be read.
        unknown: True if the image was rejected: it is too far from every class.
        error: Reason why the image could not be read, or an empty string.
    """

    image: str
    best: tuple[tuple[str, float], ...] = ()
    unknown: bool = False
    error: str = ""

    @property
    def label(self) -> str:
        """The most likely class, ``unknown``, or an empty string if the image could not be read."""
        return UNKNOWN if self.unknown else self.best[0][0] if self.best else ""

    @property
    def probability(self) -> float:
        """Probability of the most likely class; 0 if the image could not be read."""
        return self.best[0][1] if self.best else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the prediction as a JSON-serializable dict."""
        if self.error:
            return {"image": self.image, "error": self.error}
        best = [{"class": name, "probability": round(p, 6)} for name, p in self.best]
        return {"image": self.image, "label": self.label, "unknown": self.unknown, "best": best}


def predictions(
    model: Model, images: Iterable[ImageLike], top: int, unknown: float | None
) -> Iterator[Prediction]:
    """Yield a prediction for each image in order, computed in batches."""
    if top < 1:
        raise CofimaError(f"top = {top}: ask for at least one class")
    limit = _limit(model, unknown)
    items = decode_all(images, model.view.pixel_format)
    while batch := list(islice(items, BATCH)):
        good = [one.pixels for one in batch if one.pixels is not None]
        found = iter(_answers(model, torch.stack(good), top, limit) if good else [])
        for name, pixels, fault in batch:
            if pixels is None:
                yield Prediction(name, error=fault)
            else:
                best, far = next(found)
                yield Prediction(name, best, far)


def several(images: ImageLike | Sequence[ImageLike]) -> list[ImageLike]:
    """Return a list of images from one image, a sequence, or an array or tensor with a batch dimension."""
    if isinstance(images, np.ndarray | Tensor):
        return list(images) if images.ndim == 4 else [images]
    if isinstance(images, str | Path | Image.Image):
        return [images]
    return list(images)


def decode_readable(images: Iterable[ImageLike], pixel_format: PixelFormat) -> list[Tensor]:
    """Return the pixels of images; raise one error with all unreadable files."""
    found = list(decode_all(images, pixel_format))
    wrong = [f"{one.name}: {one.fault}" for one in found if one.fault]
    if wrong:
        raise CofimaError("\n".join(wrong))
    return [one.pixels for one in found if one.pixels is not None]


@torch.inference_mode()
def probabilities(model: Model, pixels: Tensor) -> Tensor:
    """Return calibrated probabilities for uint8 pixels in the model's pixel format."""
    return to_probabilities(model, model.logits(pixels))


@torch.inference_mode()
def _answers(
    model: Model, pixels: Tensor, top: int, limit: float | None
) -> list[tuple[tuple[tuple[str, float], ...], bool]]:
    far = [False] * len(pixels)
    if limit is None:
        logits = model.logits(pixels)
    else:
        gaussians, method = gaussians_of(model), model.method
        assert gaussians is not None
        features = method.net.features(model.view.test(pixels.to(method.context.device))).float().cpu()
        logits = logits_of_features(model, features)
        far = (gaussians.nearest(features) > limit).tolist()
    values, places = to_probabilities(model, logits).topk(min(top, logits.shape[1]), dim=1)
    classes = model.classes
    named = [
        tuple((classes[place], value) for place, value in zip(*row, strict=True))
        for row in zip(places.tolist(), values.tolist(), strict=True)
    ]
    return list(zip(named, far, strict=True))


def _limit(model: Model, unknown: float | None) -> float | None:
    """Return the distance beyond which an image is rejected as unknown; None without ``unknown``."""
    if unknown is None:
        return None
    if not 0 < unknown < 1:
        raise CofimaError(f"unknown = {unknown:g}: must lie between 0 and 1, e.g. 0.05")
    if gaussians_of(model) is None:
        raise CofimaError(f"unknown: {model.method.label} keeps no Gaussian of each class to measure from")
    limit = farthest(model, unknown)
    if limit is None:
        raise CofimaError(
            "unknown: no image was held out when this model learned, so no distance is known; "
            "learn with five images or more of a class, by cofima learn or extend"
        )
    return limit
