"""Heads of plain files for different classes: matched by the names of their classes, or left out."""

import json
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from cofima.classifier.merge.inputs import HEAD, CheckpointFile, skipped
from cofima.core.errors import CofimaError, problems

CLASSES = "cofima.classes"  # metadata: names of the classes as a JSON list, as cofima export --timm writes it


def skip(models: Sequence[CheckpointFile], patterns: Sequence[str]) -> list[CheckpointFile]:
    """Leave tensors out of every file; raise for a pattern that no name matches."""
    names = {key for model in models for key in model.weights}
    unused = [pattern for pattern in patterns if not any(fnmatchcase(key, pattern) for key in names)]
    if unused:
        raise CofimaError(
            f"skip = {' '.join(unused)}: no tensor has such a name, of {', '.join(_tops(names))}"
        )
    return [replace(model, weights=skipped(model.weights, patterns)) for model in models]


def _tops(names: set[str]) -> list[str]:
    """Return the first parts of the names, with a star: what a pattern may be."""
    return sorted({f"{name.partition('.')[0]}.*" if "." in name else name for name in names})


def read_class_list(path: Path) -> list[str]:
    """Return the names in a text file, one a line."""
    try:
        names = [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CofimaError(f"{path}: not a list of classes, one name a line ({error})") from error
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not names:
        raise CofimaError(f"{path}: {'class ' + twice[0] + ' stands there twice' if twice else 'is empty'}")
    return names


def known_classes(models: Sequence[CheckpointFile]) -> list[list[str]]:
    """Return the classes that the files themselves name, if all do and they differ; else nothing."""
    named = [json.loads(model.metadata.get(CLASSES, "[]")) for model in models]
    return named if all(named) and any(names != named[0] for names in named) else []


def name_rows(
    models: Sequence[CheckpointFile], classes: Sequence[Sequence[str]], head: str | None = None
) -> list[CheckpointFile]:
    """Take the heads of files apart from their networks, with the names of their rows.

    Args:
        models: The files.
        classes: Of each, the names of its classes in the order of the head's rows.
        head: Name of the head's module; by default the only one with one row a class in every file.
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
    """Leave out the head of a file, of whose rows nobody gave the names."""
    return replace(model, weights=skipped(model.weights, [f"{head}.*"]))


def _heads(models: Sequence[CheckpointFile], classes: Sequence[Sequence[str]]) -> list[str]:
    """Return the modules that have one row a class in every file."""
    modules = (key.removesuffix(".weight") for key in models[0].weights if key.endswith(".weight"))
    pairs = list(zip(models, classes, strict=True))
    return [name for name in modules if all(_rows(model, name) == len(names) for model, names in pairs)]


def _rows(model: CheckpointFile, module: str) -> int | None:
    """Return the rows of a linear layer; None where there is none of this name."""
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
