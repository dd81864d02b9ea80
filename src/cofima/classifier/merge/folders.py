"""Merge model folders: the backbones weight by weight, the heads class by class."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from cofima import methods
from cofima.classifier.merge.inputs import CheckpointFile, Inputs, ModelFolder, head_merges, network_merges
from cofima.classifier.merge.method_after import MethodAfter, StateMerge, choose_method
from cofima.classifier.merge.request import MergeSettings
from cofima.classifier.merge.tensors import merge_tensors
from cofima.core import plugins
from cofima.core.atomic import require_space
from cofima.core.errors import first_problems
from cofima.core.progress import Progress
from cofima.core.wording import count, some
from cofima.store import model_folder
from cofima.store.history import HistoryRow, now
from cofima.store.model import method_facts
from cofima.store.record import BACKBONE, HEAD, STATE, Record
from cofima.weights.mmap import MappedFile, create_mapped


def merge_folders(
    inputs: Inputs, settings: MergeSettings, out: Path, progress: Progress
) -> tuple[MethodAfter, list[str], int]:
    """Write the merged model folder; return its method, its classes, and the size of its tensors.

    If the folders cannot be merged, one error lists all differences, before anything is written.
    """
    inputs = _fitting(inputs)
    tasks = inputs.tasks
    classes = [name for task in tasks for name in task]
    after = choose_method(inputs.folders)
    states = StateMerge(inputs, after.entries)
    backbone, head, state = inputs.kinds(), inputs.head_kinds(len(classes)), states.kinds()
    size = sum(kind.bytes for part in (backbone, head, state) for kind in part.values())
    model_folder.check_writable(out)
    require_space(out, size)
    progress.say(f"merging {len(inputs.models)} models into one of {size / 1e6:,.1f} MB: {settings}")
    inputs.require_finite(progress)
    notes = [str(settings), *map(_part, inputs.every)]
    row = HistoryRow(
        kind="merge",
        task=len(tasks),
        date=now(),
        classes=classes,
        notes=notes,
        command=_command(inputs, settings),
    )
    with (
        model_folder.write(out, _record(inputs, settings, after), [row]) as aside,
        create_mapped(aside / BACKBONE, backbone, {"format": "pt"}) as body,
        create_mapped(aside / HEAD, head, {"format": "pt"}) as rows,
        create_mapped(aside / STATE, state, {"format": "pt"}) as kept,
    ):
        networks, heads = network_merges(inputs, body), head_merges(inputs, classes, rows)
        merge_tensors([*networks, *heads, *states.merges(kept)], settings, progress)
        states.pool(kept)
        if _same_backbone(inputs) and _solve_head(inputs, after, rows, kept):
            progress.say("all models have the same backbone: the head is solved anew for all classes")
    return after, classes, size


def _same_backbone(inputs: Inputs) -> bool:
    """Return True if there is nothing to merge but heads, whose statistics are of the same features."""
    bodies = {one.record.files[BACKBONE] for one in inputs.folders}
    return len(bodies) == 1 and len(inputs.folders) == len(inputs.every)


def _solve_head(inputs: Inputs, after: MethodAfter, rows: MappedFile, kept: MappedFile) -> bool:
    """Write the head that the merged statistics give, in place of averaged rows; False if they give none.

    Rows of heads that were solved for other classes do not compare: their logits have other scales.
    """
    facts = inputs.folders[-1].record.backbone
    solved = methods.build(after.name, after.options).solved_head(kept, facts["features"])
    for part, values in zip(("weight", "bias"), solved or (), strict=False):
        rows[f"{facts['classifier']}.{part}"].copy_(values)
    return solved is not None


def _fitting(inputs: Inputs) -> Inputs:
    """Return the inputs without the heads of plain files; raise with all differences between them."""
    folders = inputs.folders
    wrong = [line for other in folders[1:] for line in _differences(folders[0], other)]
    wrong += _rows_apart(folders)
    if wrong:
        raise first_problems("the models do not fit each other: the comparison", wrong)
    classifier = folders[0].record.backbone["classifier"]
    models = [_without_head(model, classifier) for model in inputs.models]
    inputs = replace(inputs, models=models, base=inputs.base and _without_head(inputs.base, classifier))
    inputs.require_fit()
    return inputs


def _record(inputs: Inputs, settings: MergeSettings, after: MethodAfter) -> Record:
    """Return config.json of the result: that of the last model, except for what was merged."""
    last, tasks = inputs.folders[-1].record, inputs.tasks
    models = [_origin(one) for one in inputs.every]
    return Record(
        method=method_facts(methods.find(after.name)),
        config=last.config | {"method": after.name, "options": after.options},
        backbone=last.backbone,
        preprocess=last.preprocess,
        data={"name": "merged", "merged": {"by": str(settings), "models": models}},
        tasks=tasks,
        planned_tasks=len(tasks),
        plugins=plugins.records([after.name]),
    )


def _rows_apart(folders: list[ModelFolder]) -> list[str]:
    """Return a message for each class whose rows of the head cannot be averaged."""
    names = [name for folder in folders for name in set(folder.classes)]
    shared = sorted({name for name in names if names.count(name) > 1})
    reasons = dict.fromkeys(
        folder.method.unmergeable_rows for folder in folders if folder.method.unmergeable_rows
    )
    return [f"class '{name}': {reason}" for reason in reasons for name in shared]


def _without_head(checkpoint: CheckpointFile, classifier: str) -> CheckpointFile:
    """Drop the head of a plain file, as its classes have no names."""
    if isinstance(checkpoint, ModelFolder):
        return checkpoint
    body = {key: value for key, value in checkpoint.weights.items() if not key.startswith(f"{classifier}.")}
    return replace(checkpoint, weights=body)


def _origin(one: CheckpointFile) -> dict[str, Any]:
    """Return the record of one of the merged models."""
    if not isinstance(one, ModelFolder):
        return {"path": str(one.path), "method": "file", "classes": 0}
    said = {"path": str(one.path), "method": one.method.label, "classes": len(one.classes)}
    return said | {"sha256": one.record.weights_digest}


def _part(one: CheckpointFile) -> str:
    """Return a description of one of the merged models, without its path, which is private."""
    name = one.path.resolve().name
    if not isinstance(one, ModelFolder):
        return f"of {name}: weights alone"
    return f"of {name}: {one.method.label}, {count(len(one.classes), 'class', 'es')} ({some(one.classes, 4)})"


def _command(inputs: Inputs, settings: MergeSettings) -> str:
    """Return the command that repeats the merge, with names in place of paths."""
    names = [one.path.resolve().name for one in inputs.models]
    words = ["cofima", "merge", *names, "-o", "MODEL", *settings.words()]
    words += ["--base", inputs.base.path.resolve().name] if inputs.base else []
    words += (
        ["--fisher", *(f"FISHER_{number}" for number in range(1, len(inputs.fishers) + 1))]
        if inputs.fishers
        else []
    )
    return shlex.join(words)


def _differences(a: ModelFolder, b: ModelFolder) -> list[str]:
    """Return the differences between two folders in architecture and preprocessing."""

    def facts(folder: ModelFolder) -> dict[str, Any]:
        body, view = folder.record.backbone, folder.record.preprocess
        said = {
            "backbone": body["name"].partition(".")[0],
            "final norm": body.get("final_norm"),
            "layers": body.get("layers", "last"),
        }
        said |= {key: body[key] for key in ("features", "classifier")}
        return said | {key: view[key] for key in ("size", "stored", "mean", "std")}

    mine, other = facts(a), facts(b)
    return [
        f"{key}: {mine[key]} in {a.path}, {other[key]} in {b.path}" for key in mine if mine[key] != other[key]
    ]
