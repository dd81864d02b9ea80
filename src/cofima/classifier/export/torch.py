"""A model as one network, from stored pixels to probabilities, and what must be told with it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from cofima.methods.components.adapters import Inserted
from cofima.store.model import Model

INPUT, OUTPUTS = "pixels", ("logits", "probabilities")


class Portable(nn.Module):
    """Take uint8 pixels [B, 3, stored, stored]; return the logits and the calibrated probabilities.

    Crop and normalisation are inside, so that whoever runs it only has to resize images.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.net, self.head = model.method.net, model.method.head()
        self.predict = model.method.predict
        self.temperature = float(model.serving.get("temperature", 1.0))
        view = model.view
        self.start, self.size = round((view.stored - view.size) / 2), view.size
        self.mean: Tensor
        self.std: Tensor
        for name, colour in (("mean", view.mean), ("std", view.std)):
            self.register_buffer(name, 255 * torch.tensor(colour).view(1, 3, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Crop the centre, normalise, classify."""
        end = self.start + self.size
        images = (pixels[:, :, self.start : end, self.start : end].float() - self.mean) / self.std
        logits = self.predict(images)
        return logits, torch.softmax(logits / self.temperature, dim=1)


@contextmanager
def settled(net: nn.Module) -> Iterator[None]:
    """Make the switches of adapters plain truths: a graph cannot branch on the value of a tensor."""
    inserted = [module for module in net.modules() if isinstance(module, Inserted)]
    switches = [module.on for module in inserted]
    for module, switch in zip(inserted, switches, strict=True):
        del module.on
        module.__dict__["on"] = bool(switch)
    try:
        yield
    finally:
        for module, switch in zip(inserted, switches, strict=True):
            del module.__dict__["on"]
            module.register_buffer("on", switch)


def facts(model: Model) -> dict[str, Any]:
    """Return what a user of the exported file must know: classes, preparation of images, origin."""
    view = model.view
    return {
        "classes": model.classes,
        "preprocess": {
            "resize_shorter_side": view.stored,
            "interpolation": "bicubic",
            "antialias": True,
            "center_crop": view.stored,
            "colour": "RGB",
            "inside": {
                "center_crop": view.size,
                "scale": 1 / 255,
                "mean": list(view.mean),
                "std": list(view.std),
            },
        },
        "temperature": float(model.serving.get("temperature", 1.0)),
        "calibrated": "temperature" in model.serving,
        "method": model.method.label,
        "backbone": {"name": model.backbone.name, "sha256": model.backbone.sha256},
        "cofima": version("cofima"),
    }


def as_text(values: dict[str, Any]) -> dict[str, str]:
    """Return facts as the strings that a file's metadata can hold: JSON, each under ``cofima.``."""
    return {f"cofima.{key}": json.dumps(value, ensure_ascii=False) for key, value in values.items()}
