"""Heads of plain files with different classes: matched by class name, or left out."""

import json
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from cofima.classifier.merge.inputs import HEAD, CheckpointFile, skipped
from cofima.core.errors import CofimaError, problems

CLASSES = "cofima.classes"  # metadata key: JSON list of class names, written by cofima export --timm


def skip(models: Sequence[CheckpointFile], patterns: Sequence[str]) -> list[CheckpointFile]:
    """Drop matching tensors from every file; raise for a pattern that matches no name."""
    names = {key for model in models for key in model.weights}
    unused = [pattern for pattern in patterns if not any(fnmatchcase(key, pattern) for key in names)]
    if unused:
        raise CofimaError(
            f"skip = {' '.join(unused)}: no tensor has such a name, of {', '.join(_tops(names))}"
        )
    return [replace(model, weights=skipped(model.weights, patterns)) for model in models]


def _tops(names: set[str]) -> list[str]:
    """Return the possible patterns: the first part of each name, followed by a star."""
    return sorted({f"{name.partition('.')[0]}.*" if "." in name else name for name in names})


def read_class_list(path: Path) -> list[str]:
    """Read class names from a text file, one per line."""
    try:
        names = [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CofimaError(f"{path}: not a list of classes, one name a line ({error})") from error
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not names:
        raise CofimaError(f"{path}: {'class ' + twice[0] + ' stands there twice' if twice else 'is empty'}")
    return names


def known_classes(models: Sequence[CheckpointFile]) -> list[list[str]]:
    """Return the class names in the files' metadata if all have them and they differ; else an empty list."""
    named = [json.loads(model.metadata.get(CLASSES, "[]")) for model in models]
    return named if all(named) and any(names != named[0] for names in named) else []


def name_rows(
    models: Sequence[CheckpointFile], classes: Sequence[Sequence[str]], head: str | None = None
) -> list[CheckpointFile]:
    """Separate the heads of files from their networks, and attach the class names of their rows.

    Args:
        models: The files.
        classes: Class names of each file, in the order of the head's rows.
        head: Name of the head's module; by default the only one with one row per class in every file.
    """
    found = [head] if head else _heads(models, classes)
    if len(found) != 1:
        what = f"several do: {', '.join(found)}; give --head NAME" if found else "none does"
        known = ", ".join(
            f"{len(names)} of {model.path}" for model, names in zip(models, classes, strict=True)
        )
        raise CofimaError(f"one layer must have a row for each class ({known}), and {what}")
    wrong = [
        f"{model.path}: {found[0]} has {rows} rows for {len(names)} classes"
        for model, names in zip(models, classes, strict=True)
        if (rows := _rows(model, found[0])) != len(names)
    ]
    if wrong:
        raise problems(f"the head {found[0]}", wrong)
    return [_apart(model, names, found[0]) for model, names in zip(models, classes, strict=True)]


def without_head(model: CheckpointFile, head: str) -> CheckpointFile:
    """Drop the head of a file whose class names are not known."""
    return replace(model, weights=skipped(model.weights, [f"{head}.*"]))


def _heads(models: Sequence[CheckpointFile], classes: Sequence[Sequence[str]]) -> list[str]:
    """Return the modules that have one row per class in every file."""
    modules = (key.removesuffix(".weight") for key in models[0].weights if key.endswith(".weight"))
    pairs = list(zip(models, classes, strict=True))
    return [name for name in modules if all(_rows(model, name) == len(names) for model, names in pairs)]


def _rows(model: CheckpointFile, module: str) -> int | None:
    """Return the number of rows of a linear layer; None if there is none of this name."""
    weight, bias = (model.weights.get(f"{module}.{key}") for key in HEAD)
    if weight is None or weight.dim() != 2 or (bias is not None and len(bias) != len(weight)):
        return None
    return len(weight)


def _apart(model: CheckpointFile, names: Sequence[str], head: str) -> CheckpointFile:
    weights = dict(model.weights)
    rows = {key: weights.pop(f"{head}.{key}") for key in HEAD if f"{head}.{key}" in weights}
    return replace(model, weights=weights, head=rows, classifier=head, classes=names)


def union(models: Sequence[CheckpointFile]) -> list[str]:
    """Return the classes of all models in order of first appearance."""
    return list(dict.fromkeys(name for model in models for name in model.classes))
