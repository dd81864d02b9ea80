"""Datasets by name: what there is, whether a name is right, and how it is loaded."""

import os
from dataclasses import replace
from pathlib import Path

from cofima.data import from_torchvision, hub, own, sources
from cofima.data.digits import digits
from cofima.data.folder import load_folder
from cofima.data.forms import Form
from cofima.data.listed import listed
from cofima.data.materialise import materialise
from cofima.data.options import DataOptions
from cofima.data.own_folder import folder_source
from cofima.data.source import Source
from cofima.data.stream import Dataset
from cofima.data.synthetic import blobs
from cofima.errors import CofimaError, did_you_mean
from cofima.progress import SILENT, Progress

__all__ = ["DataOptions", "check", "describe", "find", "load", "missing", "names"]

_KNOWN = {
    "blobs": "6 classes of generated coloured blobs, for a quick trial",
    "digits": "1,797 scanned handwritten digits of 8 x 8 pixels, 10 classes (scikit-learn)",
    "folder:PATH": "your own images: PATH/train and PATH/test (or val), or one folder per class",
    "hf:NAME": "a dataset of the Hugging Face hub (NAME or NAME@CONFIGURATION), or a folder in its formats",
    "torchvision:CLASS": "a dataset of torchvision that has been downloaded, such as torchvision:Flowers102",
}
_FOLDER = "folder:"
_PREFIXES = {_FOLDER: "folder:PATH", hub.PREFIX: "hf:NAME", from_torchvision.PREFIX: "torchvision:CLASS"}


def names() -> list[str]:
    """Return the names that ``load`` knows; capitals in a name stand for a path or another name."""
    return sorted([*_KNOWN, *sources.names(), *own.own()])


def describe(name: str) -> str:
    """Return one line about the dataset."""
    prefix = _prefix(name)
    problem = None if prefix else check(name)
    if problem:
        raise CofimaError(problem)
    if name in sources.names():
        about = sources.about(name)
        counts = " or ".join(f"{train:,} + {test:,}" for train, test in about.variants.values())
        return f"{about.title}: {about.classes} classes, {counts} images"
    if name in own.own():
        return own.own()[name].about
    return _KNOWN[_PREFIXES[prefix] if prefix else name]


def check(name: str, root: Path | None = None) -> str | None:
    """Return what is wrong with the name of a dataset, or None; nothing is loaded."""
    if name.startswith(_FOLDER):
        return _check_folder(name, root)
    if name.startswith(from_torchvision.PREFIX):
        return from_torchvision.check(name)
    if name.startswith(hub.PREFIX):
        return None if name.removeprefix(hub.PREFIX).strip() else f"dataset '{name}' needs a name: 'hf:NAME'"
    if f"{name}:" in _PREFIXES:
        return f"dataset '{name}' needs a path or a name: '{_PREFIXES[f'{name}:']}'"
    if name not in names():
        path = Path(name).expanduser()
        hint = f"; did you mean 'folder:{name}'?" if path.is_dir() else did_you_mean(name, names())
        return f"unknown dataset '{name}'{hint}"
    return None


def missing(name: str, options: DataOptions) -> str | None:
    """Return what is expected where, if a dataset of a right name is not on this machine."""
    if name.startswith(hub.PREFIX):
        return hub.installed()
    return sources.missing(name, options) if name in sources.names() else None


def find(name: str, options: DataOptions, progress: Progress = SILENT) -> Source:
    """List the images of a dataset, train and test, without reading them."""
    problem = check(name, options.root)
    if problem:
        raise CofimaError(problem)
    if name in ("digits", "blobs"):
        return listed(load(name, 8, options=options))
    if name.startswith(_FOLDER):
        return folder_source(_path(name, options.root), options)
    if name.startswith(hub.PREFIX):
        return hub.find(name, options)
    if name.startswith(from_torchvision.PREFIX):
        return from_torchvision.find(name, options, progress)
    return own.find(name, options) if name in own.own() else sources.find(name, options, progress)


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
    elif name.startswith(_FOLDER):
        dataset = load_folder(_path(name, options.root), form, options, progress)
    else:
        found = find(name, options, progress)
        dataset = materialise(found, form, skip_bad=options.skip_bad, progress=progress)
    flip = dataset.flip if options.flip is None else options.flip
    crop = dataset.crop if options.crop is None else options.crop
    return replace(dataset, name=name, flip=flip, crop=crop)


def _prefix(name: str) -> str | None:
    return next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)


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
