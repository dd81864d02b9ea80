"""Merge model folders: the backbones weight by weight, the heads class by class."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cofima import methods
from cofima.classifier.merge.inputs import CheckpointFile, Inputs, ModelFolder, network_merges
from cofima.classifier.merge.method_after import MethodAfter, StateMerge, choose_method
from cofima.classifier.merge.request import MergeSettings
from cofima.classifier.merge.tensors import ClassRows, TensorMerge, merge_tensors
from cofima.core import plugins
from cofima.core.atomic import require_space
from cofima.core.errors import first_problems
from cofima.core.progress import Progress
from cofima.store import model_folder
from cofima.store.history import HistoryRow, now
from cofima.store.model import method_facts
from cofima.store.model_folder import STATE, WEIGHTS, Record
from cofima.weights.mmap import MappedFile, TensorSpec, create_mapped


@dataclass(frozen=True)
class FolderMerge:
    """A checked merge into a model folder."""

    inputs: Inputs
    settings: MergeSettings

    @property
    def last(self) -> ModelFolder:
        """The folder whose configuration the result takes over."""
        return self.inputs.folders[-1]

    @property
    def rows(self) -> ClassRows:
        """The classes of each head."""
        base = self.inputs.base
        return ClassRows([model.classes for model in self.inputs.models], base.classes if base else ())

    def write(self, out: Path, progress: Progress) -> tuple[MethodAfter, int]:
        """Write the merged model folder; return its method, and the size of its tensors."""
        after = choose_method(self.inputs.folders)
        merged = StateMerge(self.inputs, after.entries)
        weights, state = self._kinds(), merged.kinds()
        size = sum(kind.bytes for kind in [*weights.values(), *state.values()])
        model_folder.check_writable(out)
        require_space(out, size)
        count = len(self.inputs.models)
        progress.say(f"merging {count} models into one of {size / 1e6:,.1f} MB: {self.settings}")
        with (
            model_folder.write(out, self._record(after), [self._row()]) as aside,
            create_mapped(aside / WEIGHTS, weights, {"format": "pt"}) as net,
            create_mapped(aside / STATE, state, {"format": "pt"}) as kept,
        ):
            merge_tensors([*self._merges(net), *merged.merges(kept)], self.settings, progress)
            merged.pool(kept)
        return after, size

    def _kinds(self) -> dict[str, TensorSpec]:
        kinds = self.inputs.kinds()
        for key, value in self.last.head.items():
            shape = (len(self.rows.union), *value.shape[1:])
            kinds[self.last.head_name(key)] = TensorSpec(value.dtype, shape)
        return kinds

    def _merges(self, net: MappedFile) -> Iterator[TensorMerge]:
        models, base = self.inputs.models, self.inputs.base
        given = self.inputs.fishers.tensors if self.inputs.fishers else ()
        yield from network_merges(self.inputs, net)
        for key in self.last.head:
            name = self.last.head_name(key)
            heads = {k: model.head[key] for k, model in enumerate(models) if isinstance(model, ModelFolder)}
            yield from self.rows.merges(
                name,
                heads,
                net[name],
                self.rows.union,
                base=base.head[key] if isinstance(base, ModelFolder) else None,
                fishers={k: fisher[name] for k, fisher in enumerate(given) if name in fisher},
            )

    def _row(self) -> HistoryRow:
        """Return the one row of the result's history."""
        tasks = self.inputs.tasks
        classes = [name for task in tasks for name in task]
        return HistoryRow(
            kind="merge", task=len(tasks), date=now(), classes=classes, notes=[str(self.settings)]
        )

    def _record(self, after: MethodAfter) -> Record:
        """Return config.json of the result: as of the last model, but for what was merged."""
        last, tasks = self.last.record, self.inputs.tasks
        models = [_origin(one) for one in self.inputs.every]
        return Record(
            method=method_facts(methods.find(after.name)),
            config=last.config | {"method": after.name, "options": after.options},
            backbone=last.backbone,
            preprocess=last.preprocess,
            data={"name": "merged", "merged": {"by": str(self.settings), "models": models}},
            tasks=tasks,
            planned_tasks=len(tasks),
            plugins=plugins.records([after.name]),
        )


def folder_merge(inputs: Inputs, settings: MergeSettings) -> FolderMerge:
    """Check that the folders can be merged; raise with all differences in one error."""
    folders = inputs.folders
    wrong = [line for other in folders[1:] for line in _differences(folders[0], other)]
    wrong += _rows_apart(folders)
    if wrong:
        raise first_problems("the models do not fit each other: the comparison", wrong)
    classifier = folders[0].record.backbone["classifier"]
    models = [_without_head(model, classifier) for model in inputs.models]
    inputs = replace(inputs, models=models, base=inputs.base and _without_head(inputs.base, classifier))
    inputs.require_fit()
    return FolderMerge(inputs, settings)


def _rows_apart(folders: list[ModelFolder]) -> list[str]:
    """Return a line for each class whose rows of the head cannot be averaged."""
    names = [name for folder in folders for name in set(folder.classes)]
    shared = sorted({name for name in names if names.count(name) > 1})
    reasons = dict.fromkeys(
        folder.method.unmergeable_rows for folder in folders if folder.method.unmergeable_rows
    )
    return [f"class '{name}': {reason}" for reason in reasons for name in shared]


def _without_head(checkpoint: CheckpointFile, classifier: str) -> CheckpointFile:
    """Leave out the head of a plain file: its classes have no names."""
    if isinstance(checkpoint, ModelFolder):
        return checkpoint
    body = {key: value for key, value in checkpoint.weights.items() if not key.startswith(f"{classifier}.")}
    return replace(checkpoint, weights=body)


def _origin(one: CheckpointFile) -> dict[str, Any]:
    """Return the record of one of the merged models."""
    if not isinstance(one, ModelFolder):
        return {"path": str(one.path), "method": "file", "classes": 0}
    said = {"path": str(one.path), "method": one.method.label, "classes": len(one.classes)}
    return said | {"sha256": one.record.files[WEIGHTS]}


def _differences(a: ModelFolder, b: ModelFolder) -> list[str]:
    """Return the differences of two folders in architecture and preprocessing."""

    def facts(folder: ModelFolder) -> dict[str, Any]:
        body, view = folder.record.backbone, folder.record.preprocess
        said = {"backbone": body["name"].partition(".")[0], "final norm": body.get("final_norm")}
        said |= {key: body[key] for key in ("features", "classifier")}
        return said | {key: view[key] for key in ("size", "stored", "mean", "std")}

    mine, other = facts(a), facts(b)
    return [
        f"{key}: {mine[key]} in {a.path}, {other[key]} in {b.path}" for key in mine if mine[key] != other[key]
    ]
