"""Inputs of a merge, memory-mapped and validated: model folders, files of tensors, Fisher information."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cofima import methods
from cofima.classifier.merge.tensors import SPAN, ClassRows, TensorMerge, follow
from cofima.core import plugins
from cofima.core.errors import CofimaError, first_problems
from cofima.core.progress import Progress
from cofima.methods import Method
from cofima.methods.state import Entry, check
from cofima.models.checkpoint_formats.layouts import unwrapped
from cofima.models.checkpoint_formats.reader import read_weights
from cofima.store import model_folder
from cofima.store.record import Record
from cofima.weights.mmap import DTYPE_NAMES, MappedFile, TensorSpec, read_mapped, spec_of
from cofima.weights.ops import Weights

DIFFERENT_HEADS = (
    "Heads for different classes: --skip 'fc.*' leaves tensors out of the merge, by their names; "
    "--classes A.txt B.txt, one name a line and one file a model, merges heads class by class."
)
MODEL = "model_sha256"  # metadata key of a Fisher file: digest of the weights that it was measured on
HEAD = ("weight", "bias")
TORCH = (".pth", ".tar", ".pt", ".bin")  # suffixes of files written by torch.save


@dataclass(frozen=True)
class CheckpointFile:
    """Tensors of a plain file or, as :class:`ModelFolder`, of a model folder; they stay on disk until used.

    Attributes:
        path: Path as given by the user.
        weights: Weights of the network; without its head if the class names are known.
        metadata: Metadata of a plain file.
        classes: Class names in the order of the head's rows; empty for a file without names.
        head: Weight and bias of the head, one row per class; empty for a file without names.
        classifier: Name of the head's module.
    """

    path: Path
    weights: Weights
    metadata: dict[str, str] = field(default_factory=dict)
    classes: Sequence[str] = ()
    head: Weights = field(default_factory=dict)
    classifier: str = ""

    @property
    def every_weight(self) -> Weights:
        """All weights, including the head's, under their names in the file."""
        return self.weights | {self.head_name(key): value for key, value in self.head.items()}

    def head_name(self, key: str) -> str:
        """Return the name of the head's weight or bias in the file."""
        return f"{self.classifier}.{key}"


@dataclass(frozen=True, kw_only=True)
class ModelFolder(CheckpointFile):
    """A model folder as the input of a merge.

    Attributes:
        record: Its config.json.
        method: Its method.
        state: State tensors of the method.
        entries: The schema entry of each state tensor.
    """

    record: Record
    method: type[Method]
    state: Weights
    entries: Mapping[str, Entry]


@dataclass(frozen=True)
class Inputs:
    """All inputs of a merge.

    Attributes:
        models: Models in the order of the request; the base of wise_ft is the first of them.
        base: Start of the task vectors.
        fishers: Fisher information of each model for a Fisher-weighted average; still on disk.
    """

    models: Sequence[CheckpointFile]
    base: CheckpointFile | None = None
    fishers: Sequence[Weights] = ()

    @property
    def every(self) -> list[CheckpointFile]:
        """All checkpoints, the base first."""
        return [*([self.base] if self.base else []), *self.models]

    @property
    def folders(self) -> list[ModelFolder]:
        """All model folders, the base first."""
        return [one for one in self.every if isinstance(one, ModelFolder)]

    @property
    def tasks(self) -> list[list[str]]:
        """Tasks of all models in sequence, each class in the first task that has it."""
        seen: set[str] = set()
        tasks = []
        for folder in self.folders:
            for task in folder.record.tasks:
                tasks.append([name for name in task if name not in seen])
                seen.update(task)
        return [task for task in tasks if task]

    def kinds(self) -> dict[str, TensorSpec]:
        """Return dtypes and shapes of the merged network; the wider dtype where the models differ."""
        names = self.models[0].weights
        return {key: _widest([model.weights[key] for model in self.models]) for key in names}

    def head_kinds(self, classes: int) -> dict[str, TensorSpec]:
        """Return dtypes and shapes of the merged head, with one row per class."""
        last = self.models[-1]
        return {
            last.head_name(key): TensorSpec(value.dtype, (classes, *value.shape[1:]))
            for key, value in last.head.items()
        }

    def require_fit(self) -> None:
        """Raise with all differences if the networks differ in names, shapes or dtypes."""
        first, *others = self.every
        wrong = []
        for other in others:
            where = f"{first.path} and {other.path}"
            wrong += [f"{key}: only in {first.path}" for key in first.weights if key not in other.weights]
            wrong += [f"{key}: only in {other.path}" for key in other.weights if key not in first.weights]
            for key, value in first.weights.items():
                if key in other.weights:
                    wrong += [f"{key}: {said} in {where}" for said in _differs(value, other.weights[key])]
        if wrong:
            error = first_problems("the models do not fit each other: the comparison", wrong)
            raise error if self.folders else CofimaError(f"{error}\n{DIFFERENT_HEADS}")
        if not first.weights:
            raise CofimaError(f"{first.path} has no tensors")

    def require_finite(self, progress: Progress) -> None:
        """Raise with the names of all weights that hold NaN or Inf; all tensors are read once."""
        wrong: list[str] = []
        every = [(one.path, key, value) for one in self.every for key, value in one.every_weight.items()]

        def look() -> Iterator[int]:
            for path, key, value in every:
                flat = value.reshape(-1)
                for start in range(0, len(flat), SPAN):
                    part = flat[start : start + SPAN]
                    if not _finite(part):
                        wrong.append(f"{path}: {key} holds NaN or Inf")
                        break
                    yield part.nbytes

        follow(look(), sum(value.nbytes for *_, value in every), "checking, MB", progress)
        if wrong:
            raise first_problems("the weights cannot be merged: the check", wrong)


def network_merges(inputs: Inputs, target: MappedFile) -> Iterator[TensorMerge]:
    """Yield the merge of each tensor of the networks, without heads that have class names."""
    models, base = inputs.models, inputs.base
    for key in models[0].weights:
        values = [model.weights[key] for model in models]
        fishers = [fisher[key] for fisher in inputs.fishers if key in fisher] or None
        start = base.weights[key] if base else None
        put = partial(target.put, key)
        yield TensorMerge(key, range(len(values)), values, target[key], start, fishers, put=put)


def head_merges(inputs: Inputs, classes: Sequence[str], target: MappedFile) -> Iterator[TensorMerge]:
    """Yield the merges of the heads, class by class."""
    models, base, last = inputs.models, inputs.base, inputs.models[-1]
    rows = ClassRows([model.classes for model in models], base.classes if base else ())
    for key in last.head:
        name = last.head_name(key)
        yield from rows.merges(
            name,
            {k: model.head[key] for k, model in enumerate(models) if model.head},
            target[name],
            classes,
            base=base.head[key] if base and base.head else None,
            fishers={k: fisher[name] for k, fisher in enumerate(inputs.fishers) if name in fisher},
        )


def open_checkpoint(path: Path) -> CheckpointFile:
    """Open a model folder or a plain file."""
    if path.is_dir():
        return _open_folder(path)
    if path.suffix in TORCH:
        weights, metadata = unwrapped(read_weights(path)), {"format": "pt"}
    else:
        weights, metadata = read_mapped(path)
    if unknown := [
        f"{key}: {value.dtype}" for key, value in weights.items() if value.dtype not in DTYPE_NAMES
    ]:
        raise first_problems(f"{path}: types that cannot be merged; it", unknown)
    return CheckpointFile(path, weights, metadata)


def _open_folder(path: Path) -> ModelFolder:
    record, weights, state = model_folder.read_with(
        path, lambda found: (found.record, found.weights(), found.state())
    )
    plugins.require(path, record.plugins)
    method = methods.find(record.config["method"])
    entries = check(method, state, [len(task) for task in record.tasks])
    require_linear(path, method, entries)
    head = {key: weights.pop(f"{record.backbone['classifier']}.{key}") for key in HEAD}
    return ModelFolder(
        path,
        weights,
        classes=record.classes,
        head=head,
        classifier=record.backbone["classifier"],
        record=record,
        method=method,
        state=state,
        entries=entries,
    )


def skipped(weights: Weights, patterns: Sequence[str]) -> Weights:
    """Return the tensors whose names match no pattern."""
    return {
        key: value
        for key, value in weights.items()
        if not any(fnmatchcase(key, pattern) for pattern in patterns)
    }


def require_linear(path: Path, method: type[Method], entries: Mapping[str, Entry]) -> None:
    """Raise if a model predicts with more than its backbone and a linear head."""
    more = dict.fromkeys(entry.predicts for entry in entries.values() if entry.predicts)
    if more:
        raise CofimaError(
            f"{path} is a {method.label} model: it predicts with {', '.join(more)} beside "
            "backbone and head, and only models that are backbone and linear head can be merged or measured"
        )


def open_fishers(
    paths: Sequence[Path], models: Sequence[CheckpointFile], skip: Sequence[str] = ()
) -> list[Weights]:
    """Open one Fisher file per model; raise if one does not fit its model or was measured on another."""
    opened = [(skipped(fisher, skip), said) for fisher, said in map(read_mapped, paths)]
    wrong: list[str] = []
    for path, model, (fisher, said) in zip(paths, models, opened, strict=True):
        mine = model.every_weight
        wrong += [f"{path}: {key} is not in {model.path}" for key in fisher if key not in mine]
        wrong += [
            f"{path}: {key} is {list(value.shape)}, in {model.path} {list(mine[key].shape)}"
            for key, value in fisher.items()
            if key in mine and value.shape != mine[key].shape
        ]
        here = model.record.weights_digest if isinstance(model, ModelFolder) else None
        if here and said.get(MODEL, here) != here:
            wrong.append(
                f"{path}: was measured on another model than {model.path} (or before it learned more)"
            )
    tensors = [fisher for fisher, _ in opened]
    for path, fisher in zip(paths, tensors, strict=True):
        lacking = [key for key in dict.fromkeys(k for f in tensors for k in f) if key not in fisher]
        wrong += [f"{path}: has nothing for {key}, another file has" for key in lacking]
    if wrong:
        raise first_problems("the Fisher information", wrong)
    if not tensors[0]:
        raise CofimaError(f"{paths[0]} has no tensors")
    return tensors


def _finite(values: Tensor) -> bool:
    """Return True if no value is NaN or infinite; ``aminmax`` propagates both, in one pass without a copy."""
    if not values.numel() or not values.is_floating_point():
        return True
    exact = values.float() if values.itemsize == 1 else values  # torch has no aminmax for 8-bit floats
    return all(math.isfinite(float(end)) for end in exact.aminmax())


def _widest(values: Sequence[Tensor]) -> TensorSpec:
    """Return a dtype that represents all values exactly: their own if they share one."""
    last = spec_of(values[-1])
    types = {value.dtype for value in values}
    if len(types) == 1 or not last.dtype.is_floating_point:
        return last
    return TensorSpec(torch.float64 if torch.float64 in types else torch.float32, last.shape)


def _differs(a: Tensor, b: Tensor) -> list[str]:
    if a.shape != b.shape:
        return [f"{list(a.shape)} and {list(b.shape)}"]
    if a.dtype != b.dtype and not (a.is_floating_point() and b.is_floating_point()):
        return [f"{a.dtype} and {b.dtype}"]
    return []
