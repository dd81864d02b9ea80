"""What is merged: files of tensors and model folders, opened and checked, but not read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cofima import generations
from cofima.errors import CofimaError, first_problems
from cofima.weights.mapped import NAMES, Kind, kind_of, read_mapped
from cofima.weights.pieces import Weights

# what a method may keep beside a backbone and a linear head without predicting with it
BESIDE = {"raw_head", "gaussians", "fisher", "start", "centre", "memory"}
REASONS = {"prompts": "prompts", "projection": "a random projection"}


@dataclass(frozen=True)
class Source:
    """A checkpoint: its tensors, still on disk; of a model folder also what it says and keeps.

    Attributes:
        path: As the user gave it.
        weights: The network, for a model folder without its head.
        metadata: Of a plain file.
        kept: What config.json of a model folder says; empty for a file.
        head: Weight and bias of a model folder's predicting head, one row a class.
        state: What its method keeps.
    """

    path: Path
    weights: Weights
    metadata: dict[str, str] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    head: Weights = field(default_factory=dict)
    state: Weights = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The method's name for people; ``file`` for a plain file."""
        return str(self.kept["method"]["label"]) if self.kept else "file"

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of the head's rows."""
        return [name for task in self.kept.get("tasks", ()) for name in task]

    @property
    def state_parts(self) -> set[str]:
        """What kinds of things the method keeps."""
        return {key.partition(".")[0] for key in self.state}

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        every = (self.weights, self.head, self.state)
        return sum(value.nbytes for tensors in every for value in tensors.values())


def open_source(path: Path) -> Source:
    """Open a model folder or a plain file."""
    if not path.is_dir():
        weights, metadata = read_mapped(path)
        if unknown := [f"{key}: {value.dtype}" for key, value in weights.items() if value.dtype not in NAMES]:
            raise first_problems(f"{path}: types that cannot be merged; it", unknown)
        return Source(path, weights, metadata)
    generation = generations.read(path)
    weights, state, record = generation.weights(), generation.state(), generation.record
    refuse_parts(path, record.method.label, state)
    head = {key: weights.pop(f"{record.backbone['classifier']}.{key}") for key in ("weight", "bias")}
    return Source(path, weights, {}, record.model_dump(), head, state)


def refuse_parts(path: Path, label: str, state: Mapping[str, Tensor]) -> None:
    """Refuse a model that predicts with more than a backbone and a linear head."""
    more = {key.partition(".")[0] for key in state} - BESIDE
    if more:
        known = [reason for name, reason in REASONS.items() if name in more]
        raise CofimaError(
            f"{path} is a {label} model: it predicts with {', '.join(known or sorted(more))} beside "
            "backbone and head, and only models that are backbone and linear head can be merged or measured"
        )


def kinds_that_fit(sources: Sequence[Source]) -> dict[str, Kind]:
    """Return types and shapes of the network that the sources share; refuse with every difference."""
    first, *others = sources
    wrong = []
    for other in others:
        where = f"{first.path} and {other.path}"
        wrong += [f"{key}: only in {first.path}" for key in first.weights if key not in other.weights]
        wrong += [f"{key}: only in {other.path}" for key in other.weights if key not in first.weights]
        for key, value in first.weights.items():
            if key in other.weights:
                wrong += [f"{key}: {said} in {where}" for said in _differs(value, other.weights[key])]
    if wrong:
        raise first_problems("the models do not fit each other: the comparison", wrong)
    if not first.weights:
        raise CofimaError(f"{first.path} has no tensors")
    return {key: widest([s.weights[key] for s in sources]) for key in first.weights}


def widest(values: Sequence[Tensor]) -> Kind:
    """Return the type that holds all values exactly; it is theirs where they have the same."""
    last = kind_of(values[-1])
    types = {value.dtype for value in values}
    if len(types) == 1 or not last.dtype.is_floating_point:
        return last
    return Kind(torch.float64 if torch.float64 in types else torch.float32, last.shape)


def _differs(a: Tensor, b: Tensor) -> list[str]:
    if a.shape != b.shape:
        return [f"{list(a.shape)} and {list(b.shape)}"]
    if a.dtype != b.dtype and not (a.is_floating_point() and b.is_floating_point()):
        return [f"{a.dtype} and {b.dtype}"]
    return []
