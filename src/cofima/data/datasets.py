"""Datasets by name: what there is, whether a name is right, and how it is loaded."""

import os
from dataclasses import replace
from pathlib import Path

from cofima.data.digits import digits
from cofima.data.folder import load_folder
from cofima.data.forms import Form
from cofima.data.options import DataOptions
from cofima.data.stream import Dataset
from cofima.data.synthetic import blobs
from cofima.errors import CofimaError, did_you_mean
from cofima.progress import SILENT, Progress

__all__ = ["DataOptions", "check", "describe", "load", "names"]

_KNOWN = {
    "blobs": "6 classes of generated coloured blobs, for a quick trial",
    "digits": "1,797 scanned handwritten digits of 8 x 8 pixels, 10 classes (scikit-learn)",
    "folder:PATH": "your own images: PATH/train and PATH/test (or val), or one folder per class",
}
_FOLDER = "folder:"


def names() -> list[str]:
    """Return the names that ``load`` knows; ``PATH`` in a name stands for a path."""
    return list(_KNOWN)


def describe(name: str) -> str:
    """Return one line about the dataset."""
    problem = None if name.startswith(_FOLDER) else check(name)
    if problem:
        raise CofimaError(problem)
    return _KNOWN["folder:PATH" if name.startswith(_FOLDER) else name]


def check(name: str, root: Path | None = None) -> str | None:
    """Return what is wrong with the name of a dataset, or None; nothing is loaded."""
    if name.startswith(_FOLDER):
        return _check_folder(name, root)
    if name == "folder":
        return "dataset 'folder' needs a path: 'folder:PATH'"
    if name not in _KNOWN:
        path = Path(name).expanduser()
        hint = f"; did you mean 'folder:{name}'?" if path.is_dir() else did_you_mean(name, _KNOWN)
        return f"unknown dataset '{name}'{hint}"
    return None


def load(name: str, form: Form | int, *, options: DataOptions, progress: Progress = SILENT) -> Dataset:
    """Load a dataset with every image in a form; a number stands for squares of so many pixels.

    Small images stay as small as they are. ``options.limit`` is left to the caller: see ``Stream.limited``.
    """
    problem = check(name, options.root)
    if problem:
        raise CofimaError(problem)
    form = Form(form) if isinstance(form, int) else form
    if name == "digits":
        dataset = digits(form.side, options)
    elif name == "blobs":
        dataset = blobs(side=form.side, seed=options.split_seed)
    else:
        dataset = load_folder(_path(name, options.root), form, options, progress)
    flip = dataset.flip if options.flip is None else options.flip
    crop = dataset.crop if options.crop is None else options.crop
    return replace(dataset, name=name, flip=flip, crop=crop)


def _path(name: str, root: Path | None) -> Path:
    """Return the folder below ``root``, or $COFIMA_DATA, or here if it is not there."""
    path = Path(name.removeprefix(_FOLDER)).expanduser()
    shared = Path(os.environ.get("COFIMA_DATA") or ".").expanduser()
    return root / path if root is not None else shared / path if (shared / path).exists() else path


def _check_folder(name: str, root: Path | None) -> str | None:
    path = _path(name, root)
    if not name.removeprefix(_FOLDER).strip():
        return f"dataset '{name}' needs a path: 'folder:PATH'"
    if not path.exists():
        near = [folder.name for folder in path.parent.iterdir()] if path.parent.is_dir() else []
        close = did_you_mean(path.name, near)
        return f"dataset '{name}': there is no folder {path}{close if 'did you mean' in close else ''}"
    return None if path.is_dir() else f"dataset '{name}': {path} is not a folder"
