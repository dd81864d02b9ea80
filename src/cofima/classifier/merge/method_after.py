"""The method that a merged model folder continues with, and its merged state.

Nothing here depends on the method: each declares its state entries, and how they are merged, in
``state_schema``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from cofima import methods
from cofima.classifier.merge.inputs import HEAD, Inputs, ModelFolder
from cofima.classifier.merge.tensors import By, ClassRows, TensorMerge
from cofima.methods.state import Entry
from cofima.weights.mmap import MappedFile, TensorSpec, spec_of

Get = Callable[[ModelFolder], Tensor]


@dataclass(frozen=True)
class MethodAfter:
    """Method and options of the merged model, and the state entries that it keeps."""

    name: str
    options: dict[str, Any]
    entries: frozenset[Entry]
    note: str = ""


def choose_method(folders: Sequence[ModelFolder]) -> MethodAfter:
    """Keep the models' common method if its whole state can be merged; else fall back to a generic one."""
    last = folders[-1]
    names = {folder.record.config["method"] for folder in folders}
    used = {frozenset(folder.entries.values()) for folder in folders}
    shared = frozenset.intersection(*used)
    one_start = len({folder.record.backbone["sha256"] for folder in folders}) == 1
    fit = {entry for entry in shared if entry.merge != "refuse" and (one_start or not entry.same_start)}
    if len(names) == 1 and len(used) == 1 and fit == shared:
        return MethodAfter(names.pop(), last.record.config["options"], shared)
    name, options = methods.fallback_for({entry.name for entry in fit})
    method = methods.build(name, options)
    kept = frozenset(entry for entry in fit if entry in method.entries())
    left = sorted(entry.name.removesuffix(".") for entry in frozenset.union(*used) - kept)
    note = (
        f"of {', '.join(sorted({folder.method.label for folder in folders}))}; it continues as {method.label}"
    )
    note += f", and leaves behind: {', '.join(dict.fromkeys(left))}" if left else ""
    return MethodAfter(name, methods.options_of(method), kept, note)


@dataclass(frozen=True)
class StateMerge:
    """Merge of the states of model folders, limited to the entries that the result keeps."""

    inputs: Inputs
    entries: frozenset[Entry]

    def kinds(self) -> dict[str, TensorSpec]:
        """Return dtypes and shapes of the merged state."""
        last, tasks, found = self.inputs.folders[-1], self.inputs.tasks, {}
        for key, value in last.state.items():
            entry, shape = last.entries[key], list(value.shape)
            block = entry.head_block(key)
            if entry not in self.entries:
                continue
            if entry.axis == "class":
                shape[entry.dim] = sum(map(len, tasks))
                if entry.lengths_of(key):
                    rows = self._pooled[entry].rows(entry.rest(key))
                    shape[0] = sum(len(each) for each in rows)
                found[key] = TensorSpec(value.dtype, tuple(shape))
            elif block is None:
                found[key] = spec_of(value)
            elif block[0] == 0:  # the blocks of all models have the same parameters
                for number, task in enumerate(tasks):
                    found[entry.in_block(number, block[1])] = TensorSpec(value.dtype, (len(task), *shape[1:]))
        return found

    def merges(self, out: MappedFile) -> Iterator[TensorMerge]:
        """Yield the merge of each tensor, except those that are pooled per class."""
        tasks = self.inputs.tasks
        every = [name for task in tasks for name in task]
        for key, target in out.items():
            entry = self._entry(key)
            block = entry.head_block(key)
            if entry.merge == "pool":
                continue
            if entry.axis == "class":
                rows = target.movedim(entry.dim, 0)
                yield from self._rows(entry, key, partial(_class_rows, entry, key), rows, every)
            elif block is not None:
                yield from self._rows(
                    entry, key, partial(_block_rows, entry, block[1]), target, tasks[block[0]]
                )
            else:
                yield self._whole(entry, key, out)

    def pool(self, out: Mapping[str, Tensor]) -> None:
        """Fill in the pooled entries, per class."""
        for entry, pooled in self._pooled.items():
            for key in [key for key in out if entry.covers(key)]:
                start, ragged = 0, entry.lengths_of(key) is not None
                for each in pooled.rows(entry.rest(key)):
                    stop = start + (len(each) if ragged else 1)
                    out[key].movedim(entry.dim, 0)[start:stop] = each if ragged else each[None]
                    start = stop

    @cached_property
    def _pooled(self) -> dict[Entry, "PooledClasses"]:
        """Pooled rows of each entry that is pooled."""
        every = [name for task in self.inputs.tasks for name in task]
        return {
            entry: PooledClasses(entry, self.inputs.folders, every)
            for entry in self.entries
            if entry.pool is not None
        }

    def _entry(self, key: str) -> Entry:
        return next(entry for entry in self.entries if entry.covers(key))

    def _whole(self, entry: Entry, key: str, out: MappedFile) -> TensorMerge:
        """Return the merge of a tensor without a class axis."""
        values, base = self._values(entry, lambda folder: folder.state[key])
        put = partial(out.put, key)
        return TensorMerge(key, list(values), list(values.values()), out[key], base, by=_by(entry), put=put)

    def _rows(
        self, entry: Entry, key: str, get: Get, target: Tensor, names: Sequence[str]
    ) -> Iterator[TensorMerge]:
        """Yield the merges of a tensor with one row per class."""
        (values, base), inputs = self._values(entry, get), self.inputs
        if entry.merge == "average":
            start = inputs.base.classes if inputs.base else ()
            rows = ClassRows([model.classes for model in inputs.models], start)
        else:
            rows = ClassRows([folder.classes for folder in inputs.folders])
        fishers = self._head_fishers(entry.rest(key), values) if entry.merge == "average" else None
        yield from rows.merges(key, values, target, names, base=base, fishers=fishers, by=_by(entry))

    def _values(self, entry: Entry, get: Get) -> tuple[dict[int, Tensor], Tensor | None]:
        """Return each model's tensor, and the base's for an average.

        For other merges the base counts as one of the models.
        """
        inputs = self.inputs
        if entry.merge != "average":
            return {place: get(folder) for place, folder in enumerate(inputs.folders)}, None
        base = get(inputs.base) if isinstance(inputs.base, ModelFolder) else None
        return {k: get(m) for k, m in enumerate(inputs.models) if isinstance(m, ModelFolder)}, base

    def _head_fishers(self, name: str, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the head's Fisher information for a state tensor that is another head, of the same shape."""
        found = {}
        for place, value in values.items():
            model = self.inputs.models[place]
            if self.inputs.fishers and isinstance(model, ModelFolder) and name in HEAD:
                fisher = self.inputs.fishers[place].get(model.head_name(name))
                if fisher is not None and fisher.shape == value.shape:
                    found[place] = fisher
        return found


def _by(entry: Entry) -> By:
    return "sum" if entry.merge == "sum" else "last" if entry.merge == "last" else "rule"


def _class_rows(entry: Entry, key: str, folder: ModelFolder) -> Tensor:
    return folder.state[key].movedim(entry.dim, 0)


def _block_rows(entry: Entry, name: str, folder: ModelFolder) -> Tensor:
    """Return a parameter of all blocks of the head, one row per class."""
    return torch.cat([folder.state[entry.in_block(k, name)] for k in range(len(folder.record.tasks))])


class PooledClasses:
    """Rows of one entry for each class of the result, pooled if several models have the class.

    Only pooled rows are in memory; those of a class that a single model has stay in its file.
    """

    def __init__(self, entry: Entry, folders: Sequence[ModelFolder], names: Sequence[str]) -> None:
        parts = [_by_class(entry, folder) for folder in folders]
        self.classes: list[Mapping[str, Tensor]] = []
        for name in names:
            known = [part[name] for part in parts if name in part]
            self.classes.append(entry.pool(known) if entry.pool and len(known) > 1 else known[0])

    def rows(self, key: str) -> Iterator[Tensor]:
        """Return an iterator over the rows of each class; ``key`` is the name after the entry's prefix."""
        return (each[key] for each in self.classes)


def _by_class(entry: Entry, folder: ModelFolder) -> dict[str, dict[str, Tensor]]:
    """Return the rows of an entry for each class of a folder, keyed by the name after the prefix."""
    found: dict[str, dict[str, Tensor]] = {name: {} for name in folder.classes}
    for key, value in folder.state.items():
        if folder.entries[key] == entry:
            lengths = entry.lengths_of(key)
            rows = (
                torch.split(value, folder.state[lengths].tolist())
                if lengths
                else value.movedim(entry.dim, 0).unbind()
            )
            for each, row in zip(found.values(), rows, strict=True):
                each[entry.rest(key)] = row
    return found
