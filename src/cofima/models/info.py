"""Metadata of a backbone: name and tag, hash of the weights, pre-training data, preprocessing."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from cofima.core.errors import CofimaError
from cofima.models import layers, registry
from cofima.models.checkpoint_formats.layouts import classifier
from cofima.models.options import Layers, ModelOptions
from cofima.models.registry import ALIASES

ELSEWHERE = ("hf-hub:", "hf_hub:", "local-dir:")  # prefixes of names outside of timm's own registry


# Model folders contain this metadata and may come from untrusted sources: a name must be timm's own, so that
# building the network downloads nothing and reads no file, and sizes must be such that it can be built.
PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?$", max_length=200)]
Pixels = Annotated[int, Field(ge=1, le=4096)]
Share = Annotated[float, Field(gt=0, le=1)]
Level = Annotated[float, Field(allow_inf_nan=False)]
Spread = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class BackboneFacts:
    """Identity and preprocessing of a backbone."""

    name: PlainName
    features: Annotated[int, Field(ge=1, le=2**16)]
    size: Pixels
    crop_pct: Share
    mean: tuple[Level, Level, Level]
    std: tuple[Spread, Spread, Spread]
    interpolation: str
    classifier: str
    sha256: str
    alias: str = ""
    tag: str = ""
    pretraining: str = ""
    overlap: str = ""
    layout: str = ""
    final_norm: str = "pretrained"
    layers: Layers = "last"

    @property
    def source(self) -> str:
        """Name for loading the weights, which may differ from timm's."""
        return self.alias if self.alias.startswith(ELSEWHERE) else self.name

    @property
    def stored(self) -> int:
        """Shorter side of an image after resizing, before the center crop."""
        return math.floor(self.size / self.crop_pct)

    def as_json(self) -> dict[str, Any]:
        """Return the metadata as JSON-serializable values, for a model folder."""
        return asdict(self)


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 of weights: names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for key in sorted(weights):
        value = weights[key].detach().cpu().contiguous()
        digest.update(f"{key} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def identify(name: str, module: nn.Module, options: ModelOptions, layout: str) -> BackboneFacts:
    """Return the metadata of a backbone after it has been built and its weights loaded."""
    from timm.data import resolve_model_data_config

    data, alias = resolve_model_data_config(module), ALIASES.get(name)
    channels, height, _ = data["input_size"]
    if channels != 3:
        raise CofimaError(f"backbone '{name}' takes {channels} channels; images here have 3")
    resolved, tag = _full_name(name, module, options)
    size = options.img_size or height
    return BackboneFacts(
        name=resolved,
        features=_width(module, options, size),
        size=size,
        crop_pct=float((alias and alias.crop_pct) or data["crop_pct"]),
        mean=(alias and alias.mean) or tuple(data["mean"]),
        std=(alias and alias.std) or tuple(data["std"]),
        interpolation=data["interpolation"],
        classifier=classifier(module),
        sha256=fingerprint(module.state_dict()),
        alias=name if alias or name.startswith(ELSEWHERE) else "",
        tag=tag,
        pretraining=_pretraining(name, tag, options),
        layout=layout,
        final_norm=options.final_norm,
        layers=options.layers,
    )


def _width(module: nn.Module, options: ModelOptions, size: int) -> int:
    if options.layers != "last":
        return layers.width(module, size)
    return int(getattr(module, "head_hidden_size", 0) or getattr(module, "num_features", 0))


def _full_name(name: str, module: nn.Module, options: ModelOptions) -> tuple[str, str]:
    """Return timm's name with the tag of the loaded weights, and the tag."""
    resolved = registry.resolve(name)
    architecture, _, tag = resolved.partition(".")
    if resolved.startswith(ELSEWHERE):
        return str(getattr(module, "pretrained_cfg", {}).get("architecture") or resolved), ""
    if not tag and options.pretrained and options.checkpoint is None:
        tag = getattr(module, "pretrained_cfg", {}).get("tag") or ""
    return (f"{architecture}.{tag}" if tag else architecture), tag


def _pretraining(name: str, tag: str, options: ModelOptions) -> str:
    """Describe the pre-training data, and the source of that information."""
    alias = ALIASES.get(name)
    if options.checkpoint is not None:
        return f"{alias.pretraining if alias else 'not known'} (weights from {options.checkpoint.name})"
    if not options.pretrained:
        return "none (from scratch)"
    return alias.pretraining if alias else registry.pretraining(tag)
