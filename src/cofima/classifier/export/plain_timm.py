"""Export to weights that plain timm loads, if a model is just a backbone and a linear head."""

import json
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor

from cofima.classifier.export.formats import Exported, as_text, compare, metadata
from cofima.core.atomic import write_aside
from cofima.core.errors import CofimaError
from cofima.methods import Method
from cofima.models.backbone import build_empty
from cofima.models.head import Head
from cofima.store.model import Model
from cofima.weights.mmap import write_tensors


def to_timm(model: Model, path: Path, images: Tensor) -> Exported:
    """Write weights that plain timm loads, as ``timm.create_model(..., checkpoint_path=path)``."""
    refuse_not_plain(model, path)
    settings = timm_settings(model)
    meta = as_text(metadata(model)) | {"format": "pt", "cofima.timm": json.dumps(settings)}
    weights = {key: value.detach().cpu().contiguous() for key, value in model.weights().items()}
    bias = f"{model.backbone.classifier}.bias"
    weights[bias] = model.offset(weights[bias])
    with write_aside(path) as aside:
        write_tensors(aside, weights, meta)
        with torch.random.fork_rng(devices=[]):
            net = timm.create_model(settings["architecture"], **settings["arguments"])
        net.load_state_dict(load_file(aside))
        net.eval()
        return compare(model, path, images, lambda pixels: net(model.view.test(pixels)))


def timm_settings(model: Model) -> dict[str, Any]:
    """Return the arguments of ``timm.create_model`` for the weights, and the preprocessing."""
    known = model.backbone
    arguments: dict[str, Any] = {"num_classes": len(model.classes)}
    if hasattr(build_empty(model.config.backbone, known.size), "patch_embed"):
        arguments["img_size"] = known.size  # which only a transformer needs to be built
    data = {
        "input_size": [3, known.size, known.size],
        "crop_pct": known.crop_pct,
        "interpolation": "bicubic",
        "mean": list(known.mean),
        "std": list(known.std),
    }
    return {"architecture": model.config.backbone, "arguments": arguments, "data": data}


def refuse_not_plain(model: Model, path: Path) -> None:
    """Raise if timm alone would predict something else with the weights."""
    if reason := not_plain(model):
        raise CofimaError(
            f"{path}: plain timm cannot hold this model, as {reason}; export it with --onnx or --torchscript"
        )


def not_plain(model: Model) -> str | None:
    """Return the part of a model that is neither backbone nor linear head, in words, or None."""
    method = model.method
    if type(method).predict is not Method.predict:
        return f"{method.label} predicts with parts of its own beside backbone and head (prompts)"
    if type(method.head()) is not Head:
        parts = dict.fromkeys(entry.predicts for entry in method.state_schema if entry.predicts)
        return f"{method.label} predicts with {', '.join(parts) or 'a head of its own'} beside the backbone"
    plain = build_empty(model.config.backbone, model.backbone.size).state_dict()
    added = [key for key in method.net.backbone.state_dict() if key not in plain]
    if added:
        return f"{method.label} has put parts into the backbone ({added[0]}, ...)"
    if model.backbone.classifier == "cofima_head":
        return f"{model.backbone.name} has more than one classifier in timm"
    return None
