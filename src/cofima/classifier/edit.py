"""Rename or remove a class of a model."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from cofima.core.errors import CofimaError, did_you_mean
from cofima.core.names import name_fault, shortened
from cofima.data.image_set import concatenate
from cofima.methods import state as states
from cofima.store.history import HistoryRow, Kind, now
from cofima.store.model import Model, rebuild_model


def rename(model: Model, old: str, new: str) -> Model:
    """Return the model with a class renamed; nothing else changes."""
    find(model, old)
    new = new.strip()
    if new in model.classes:
        raise CofimaError(f"rename: '{new}' is a known class already")
    if fault := name_fault(new):
        raise CofimaError(f"rename: '{shortened(new)}' is no name: {fault}")
    tasks = [tuple(new if name == old else name for name in task) for task in model.tasks]
    made = replace(model, tasks=tasks, history=[*model.history, _row(model, "rename", [old, new])])
    made.serving = _named(model.serving, lambda name: new if name == old else name)
    return made


def remove_class(model: Model, name: str) -> Model:
    """Return the model without a class: its row of the head, its statistics and its stored images."""
    label = find(model, name)
    if len(model.classes) == 1:
        raise CofimaError(f"remove-class: '{name}' is the only class of this model")
    sizes = [len(task) for task in model.tasks]
    state = states.remove_class(type(model.method), model.method.state(), sizes, label)
    head = {f"{model.backbone.classifier}.{part}" for part in ("weight", "bias")}
    weights = {k: states.drop_row(v, label) if k in head else v.clone() for k, v in model.weights().items()}
    tasks = [tuple(other for other in task if other != name) for task in model.tasks]
    made = rebuild_model(model, weights, state, tasks, model.method.context.progress)
    made.serving = _named(made.serving, lambda other: None if other == name else other)
    for part in ("distances", "offsets"):
        if values := made.serving.get(part):
            del values[label]
    if made.held_out is not None:
        made.held_out = made.held_out.without(label)
    if made.images is not None:
        others = made.images.select(made.images.labels != label)
        labels = others.labels - (others.labels > label).long()
        made.images = concatenate(replace(others, labels=labels))
    remains = [
        f"'{name}' is removed, but {rest}" for rest in states.remains_of_removed(type(model.method), state)
    ]
    for note in remains:
        model.method.context.progress.say(note)
    row = _row(model, "remove class", [name], remains)
    row.kept_features = None if made.held_out is None else len(made.held_out)
    made.history.append(row)
    return made


def find(model: Model, name: str) -> int:
    """Return the label of a class; raise with a hint if it does not exist."""
    if name in model.classes:
        return model.classes.index(name)
    known = did_you_mean(name, model.classes)
    raise CofimaError(f"the model has no class '{name}'{known if len(known) < 500 else ''}")


def _named(serving: dict[str, Any], name: Callable[[str], str | None]) -> dict[str, Any]:
    """Return a copy of the serving data with renamed classes; a class renamed to None is dropped."""
    kept = deepcopy(serving)
    for part, counts in kept.get("accuracy", {}).items():
        kept["accuracy"][part] = {new: n for old, n in counts.items() if (new := name(old)) is not None}
    return kept


def _row(model: Model, kind: Kind, classes: list[str], notes: Sequence[str] = ()) -> HistoryRow:
    return HistoryRow(kind=kind, task=len(model.tasks), date=now(), classes=classes, notes=list(notes))
