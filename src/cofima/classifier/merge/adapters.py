r"""Average LoRA adapters: folders as peft writes them, with heads matched by class name.

An adapter changes a weight by :math:`s B A`. The average of two changes is not the product of averaged
factors; it is, exactly, the product of the factors side by side,

.. math:: \sum_k w_k s_k B_k A_k = \begin{pmatrix} w_1 s_1 B_1 & \cdots & w_n s_n B_n \end{pmatrix}
          \begin{pmatrix} A_1 \\ \vdots \\ A_n \end{pmatrix}

so the rank of the result is the sum of the ranks. No network is built, and peft is not needed.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cofima.classifier.merge.request import AVERAGE, MergeRequest, output_problems
from cofima.core.atomic import write_aside
from cofima.core.errors import CofimaError, problems
from cofima.weights.average import average_all
from cofima.weights.ops import Weights

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MODEL_CONFIG = "config.json"  # written by transformers; holds the class names
_PLACEHOLDER = re.compile(r"LABEL_\d+")  # names that transformers gives to unnamed classes
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<table>embedding_)?(?P<side>[AB])(\.weight)?$")


@dataclass(frozen=True)
class AdapterFolder:
    """One adapter folder.

    Attributes:
        path: The folder.
        config: Its adapter_config.json.
        weights: Its tensors.
        model: Its config.json; empty if there is none.
    """

    path: Path
    config: dict[str, Any]
    weights: Weights
    model: dict[str, Any]

    @property
    def classes(self) -> list[str]:
        """Class names in the order of the head's rows; empty if not known."""
        names = self.model.get("id2label") or {}
        found = [str(names[key]) for key in sorted(names, key=int)]
        return [] if all(_PLACEHOLDER.fullmatch(name) for name in found) else found

    @property
    def factors(self) -> dict[str, str]:
        """Names of the factor A of each layer, mapped to those of its factor B."""
        names = [key for key in self.weights if (m := _FACTOR.match(key)) and m["side"] == "A"]
        return {key: _other(key) for key in names}

    def scale(self, key: str, rank: int) -> float:
        """Return the scale of a layer's update, alpha over the rank (or its square root with rsLoRA)."""
        module = _module(key)
        patterns: Mapping[str, float] = self.config.get("alpha_pattern") or {}
        mine = (alpha for name, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({name})", module))
        alpha = next(mine, self.config["lora_alpha"])
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def is_adapter(path: Path) -> bool:
    """Return True if a folder is a peft adapter."""
    return (path / CONFIG).is_file()


def merge_adapters(request: MergeRequest, out: Path, force: bool) -> tuple[int, str, list[str], list[str]]:
    """Write the average of adapters; return the size of its tensors, its label, its classes, and messages."""
    found = request.problems() or output_problems(out, request.models, folder=True, force=force)
    if request.method != AVERAGE:
        found.append(
            f"method = {request.method}: adapters can be averaged only, and have no Fisher information"
        )
    found += [f"{path}: is no adapter of peft, others are" for path in request.models if not is_adapter(path)]
    if found:
        raise problems("the merge", found)
    adapters = [_read(path) for path in request.models]
    settings = request.settings()
    shares = list(settings.weights) if settings.lam is None else [1 - settings.lam, settings.lam]
    shares = [share / sum(shares) for share in shares]
    named = all(adapter.classes for adapter in adapters)
    classes = list(dict.fromkeys(name for adapter in adapters for name in adapter.classes if named))
    rank, weights = _factors(adapters, shares)
    weights |= _others(adapters, shares, classes)
    with write_aside(out) as aside:
        aside.mkdir()
        save_file(weights, aside / WEIGHTS, metadata={"format": "pt"})
        _write(aside / CONFIG, _config(adapters, rank))
        if classes:
            _write(aside / MODEL_CONFIG, _model_config(adapters[-1].model, classes))
    size = sum(value.nbytes for value in weights.values())
    return size, "LoRA adapter", classes, _notes(adapters)


def _read(path: Path) -> AdapterFolder:
    """Read a folder; raise if the adapter cannot be averaged exactly."""
    config = json.loads((path / CONFIG).read_text("utf-8"))
    if config.get("peft_type") != "LORA" or config.get("use_dora"):
        kind = "DORA" if config.get("use_dora") else config.get("peft_type")
        raise CofimaError(f"{path} is an adapter of type {kind}; only LORA can be averaged")
    if not (path / WEIGHTS).is_file():
        raise CofimaError(f"{path} has no {WEIGHTS}: save the adapter with safe_serialization=True")
    model = path / MODEL_CONFIG
    said = json.loads(model.read_text("utf-8")) if model.is_file() else {}
    return AdapterFolder(path, config, load_file(path / WEIGHTS), said)


def _factors(adapters: Sequence[AdapterFolder], shares: Sequence[float]) -> tuple[int, Weights]:
    """Return the rank of the average and its factors: all factors concatenated, zero-padded to the rank."""
    layers = dict.fromkeys(key for adapter in adapters for key in adapter.factors)
    ranks = {key: sum(len(a.weights[key]) for a in adapters if key in a.weights) for key in layers}
    rank = max(ranks.values(), default=0)
    merged: Weights = {}
    for key in layers:
        have = [(a, share) for a, share in zip(adapters, shares, strict=True) if key in a.weights]
        down = torch.cat([a.weights[key] for a, _ in have])
        up = torch.cat(
            [a.weights[_other(key)] * (share * a.scale(key, len(a.weights[key]))) for a, share in have], dim=1
        )
        merged[key] = _padded(down, rank, 0)
        merged[_other(key)] = _padded(up, rank, 1)
    return rank, merged


def _others(adapters: Sequence[AdapterFolder], shares: Sequence[float], classes: Sequence[str]) -> Weights:
    """Return the average of full tensors; rows of a head per class, over the adapters that have the class."""
    keys = dict.fromkeys(key for a in adapters for key in a.weights if not _FACTOR.match(key))
    merged: Weights = {}
    for key in keys:
        lacking = [a.path for a in adapters if key not in a.weights]
        if lacking:
            raise CofimaError(
                f"'{key}' is not in {lacking[0]}, another adapter has it: both must save that module"
            )
        values = [a.weights[key] for a in adapters]
        by_class = all(len(v) == len(a.classes) for v, a in zip(values, adapters, strict=True) if v.ndim)
        if classes and by_class and values[0].ndim:
            rows = [dict(zip(a.classes, v, strict=True)) for a, v in zip(adapters, values, strict=True)]
            mean = average_all(rows, shares)
            merged[key] = torch.stack([mean[name] for name in classes])
        elif len({v.shape for v in values}) > 1:
            shapes = " and ".join(
                f"{list(v.shape)} in {a.path}" for v, a in zip(values, adapters, strict=True)
            )
            raise CofimaError(
                f"'{key}' is {shapes}: heads of different classes need names (id2label); write them into "
                "each folder with model.config.save_pretrained(FOLDER)"
            )
        else:
            merged[key] = average_all([{key: v} for v in values], shares)[key]
    return merged


def _config(adapters: Sequence[AdapterFolder], rank: int) -> dict[str, Any]:
    """Return the configuration of the average: all layers at the common rank, the scale folded into B."""
    targets = [adapter.config.get("target_modules") for adapter in adapters]
    if all(isinstance(target, list) for target in targets):
        layers: Any = sorted({name for target in targets for name in target or ()})
    else:
        layers = targets[0] if len({*map(str, targets)}) == 1 else _pattern(targets)
    saved = sorted({name for adapter in adapters for name in adapter.config.get("modules_to_save") or ()})
    return adapters[-1].config | {
        "r": rank,
        "lora_alpha": rank,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": layers,
        "modules_to_save": saved or None,
    }


def _pattern(targets: Sequence[Any]) -> str:
    """Return one regular expression for layers given by names or by regular expressions."""
    parts = [t if isinstance(t, str) else rf"(.*\.)?({'|'.join(map(re.escape, t or ()))})" for t in targets]
    return "|".join(f"({part})" for part in parts)


def _model_config(config: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    return {**config} | {
        "id2label": {str(index): name for index, name in enumerate(classes)},
        "label2id": {name: index for index, name in enumerate(classes)},
    }


def _notes(adapters: Sequence[AdapterFolder]) -> list[str]:
    notes = []
    bases = {adapter.config.get("base_model_name_or_path") for adapter in adapters}
    if len(bases) > 1:
        named = ", ".join(map(str, sorted(map(str, bases))))
        notes.append(f"the adapters name different base models ({named}): expect little of their average")
    if not all(adapter.classes for adapter in adapters):
        notes.append(
            "not every folder has a config.json with id2label: rows of heads are matched by their order"
        )
    return notes


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def _padded(value: Tensor, size: int, dim: int) -> Tensor:
    """Zero-pad a tensor at the end of a dimension, up to a size."""
    shape = [*value.shape]
    shape[dim] = size - shape[dim]
    return torch.cat([value, value.new_zeros(shape)], dim).contiguous()


def _module(key: str) -> str:
    found = _FACTOR.match(key)
    assert found is not None
    return found["module"].removeprefix("base_model.model.")


def _other(key: str) -> str:
    """Return the name of the factor B that belongs to a factor A."""
    head, _, tail = key.rpartition("_A")
    return f"{head}_B{tail}"
