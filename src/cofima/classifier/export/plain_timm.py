"""Export to weights that plain timm can load, for models that are a backbone with a linear head."""

import json
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor

from cofima.classifier.export.card import model_card, name_of
from cofima.classifier.export.formats import Exported, as_text, compare, metadata
from cofima.core.atomic import write_aside
from cofima.core.errors import CofimaError
from cofima.methods import Method
from cofima.models.backbone import build_empty
from cofima.models.head import Head
from cofima.store.model import Model
from cofima.weights.mmap import write_tensors

# entries of pretrained_cfg that timm needs to change the first or the last layer
BUILD = ("first_conv", "classifier", "pool_size", "fixed_input_size")


def to_timm(model: Model, path: Path, images: Tensor) -> Exported:
    """Write weights for plain timm: ``timm.create_model(..., checkpoint_path=path)``."""
    refuse_not_plain(model, path)
    with write_aside(path) as aside:
        _write_weights(model, aside)
        net = _built(model)
        net.load_state_dict(load_file(aside))
        return compare(model, path, images, lambda pixels: net(model.view.test(pixels)))


def to_timm_hub(model: Model, folder: Path, images: Tensor) -> Exported:
    """Write a folder that timm loads from the hub or with ``timm.create_model("local-dir:FOLDER", True)``.

    It holds the weights, the model card, and ``config.json`` with architecture, classes and preprocessing.
    """
    refuse_not_plain(model, folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CofimaError(f"{folder} is there and not an empty folder: give another one")
    with write_aside(folder) as aside:
        aside.mkdir()
        _write_weights(model, aside / "model.safetensors")
        net = _built(model)
        (aside / "config.json").write_text(json.dumps(_hub_config(model, net), indent=2) + "\n", "utf-8")
        card = model_card(model, name_of(folder), library="timm")
        (aside / "README.md").write_text(card, "utf-8")
        net.load_state_dict(load_file(aside / "model.safetensors"))
        return compare(model, folder, images, lambda pixels: net(model.view.test(pixels)))


def _write_weights(model: Model, path: Path) -> None:
    meta = as_text(metadata(model)) | {"format": "pt", "cofima.timm": json.dumps(timm_settings(model))}
    weights = {key: value.detach().cpu().contiguous() for key, value in model.weights().items()}
    bias = f"{model.backbone.classifier}.bias"
    weights[bias] = model.offset(weights[bias])
    write_tensors(path, weights, meta)


def _built(model: Model) -> Any:
    """Return timm's network for the weights, not loaded yet."""
    settings = timm_settings(model)
    with torch.random.fork_rng(devices=[]):
        return timm.create_model(settings["architecture"], **settings["arguments"]).eval()


def _hub_config(model: Model, net: Any) -> dict[str, Any]:
    """Return config.json in timm's format for hub repositories."""
    settings = timm_settings(model)
    known = {key: net.pretrained_cfg[key] for key in BUILD if net.pretrained_cfg.get(key) is not None}
    arguments = {key: value for key, value in settings["arguments"].items() if key != "num_classes"}
    return {
        "architecture": net.pretrained_cfg["architecture"],
        "num_classes": len(model.classes),
        "num_features": net.num_features,
        "label_names": model.classes,
        "model_args": arguments,
        "pretrained_cfg": known | settings["data"] | {"num_classes": len(model.classes)},
    }


def timm_settings(model: Model) -> dict[str, Any]:
    """Return the arguments of ``timm.create_model`` and the preprocessing."""
    known = model.backbone
    arguments: dict[str, Any] = {"num_classes": len(model.classes)}
    if hasattr(build_empty(model.config.backbone, known.size), "patch_embed"):
        arguments["img_size"] = known.size  # only transformers take it
    data = {
        "input_size": [3, known.size, known.size],
        "crop_pct": known.crop_pct,
        "interpolation": "bicubic",
        "mean": list(known.mean),
        "std": list(known.std),
    }
    return {"architecture": model.config.backbone, "arguments": arguments, "data": data}


def refuse_not_plain(model: Model, path: Path) -> None:
    """Raise if plain timm would predict something else with the weights."""
    if reason := not_plain(model):
        raise CofimaError(
            f"{path}: plain timm cannot hold this model, as {reason}; export it with --onnx or --pt2"
        )


def not_plain(model: Model) -> str | None:
    """Return the reason why a model is more than a backbone and a linear head, or None."""
    method = model.method
    if type(method).predict is not Method.predict:
        return f"{method.label} predicts with parts of its own beside backbone and head (prompts)"
    if type(method.head()) is not Head:
        parts = dict.fromkeys(entry.predicts for entry in method.entries() if entry.predicts)
        return f"{method.label} predicts with {', '.join(parts) or 'a head of its own'} beside the backbone"
    if model.backbone.layers != "last":
        setting = f"model.layers={model.backbone.layers}"
        return f"its head sees all layers of the backbone ({setting}), and timm's only the last"
    plain = build_empty(model.config.backbone, model.backbone.size).state_dict()
    added = [key for key in method.net.backbone.state_dict() if key not in plain]
    if added:
        return f"{method.label} has put parts into the backbone ({added[0]}, ...)"
    if model.backbone.classifier == "cofima_head":
        return f"{model.backbone.name} has more than one classifier in timm"
    return None
