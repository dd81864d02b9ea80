"""Datasets by name: list them, check a name, find the images, load them."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch

from cofima.core.errors import CofimaError, CofimaWarning, did_you_mean
from cofima.core.names import shortened
from cofima.core.progress import SILENT, Progress
from cofima.core.wording import some
from cofima.data import sources
from cofima.data.image_set import ImageSet, join
from cofima.data.loading.loader import Loaded, Sample, load_small
from cofima.data.loading.loader import load as load_samples
from cofima.data.loading.pixel_format import PixelFormat
from cofima.data.options import DataOptions
from cofima.data.sources import folder, huggingface, in_memory, plugin, torchvision
from cofima.data.sources.base import LabeledRow, Source, counted
from cofima.data.stream import Dataset

__all__ = ["DataOptions", "check", "describe", "find", "load", "missing", "names", "read"]

# sources with many datasets each, by the prefix of their names
_PREFIXED = {module.PREFIX: module for module in (folder, huggingface, torchvision)}
_DESCRIPTIONS = in_memory.NAMES | {module.USAGE: module.DESCRIPTION for module in _PREFIXED.values()}


def names() -> list[str]:
    """Return the names that ``load`` accepts; uppercase words in a name are placeholders."""
    return sorted([*_DESCRIPTIONS, *sources.names(), *plugin.plugin_datasets()])


def describe(name: str) -> str:
    """Return a one-line description of a dataset."""
    if prefixed := _PREFIXED.get(_prefix(name)):
        return str(prefixed.DESCRIPTION)
    if problem := check(name):
        raise CofimaError(problem)
    if name in sources.names():
        info = sources.info(name)
        counts = " or ".join(f"{train:,} + {test:,}" for train, test in info.variants.values())
        return f"{info.title}: {info.classes} classes, {counts} images"
    own = plugin.plugin_datasets()
    return own[name].about if name in own else _DESCRIPTIONS[name]


def check(name: str, root: Path | None = None) -> str | None:
    """Return the problem with the name of a dataset, or None if it is valid; nothing is loaded."""
    if prefixed := _PREFIXED.get(_prefix(name)):
        problem: str | None = prefixed.check(name, root)
        return problem
    if f"{name}:" in _PREFIXED:
        return f"dataset '{name}' needs a path or a name: '{_PREFIXED[f'{name}:'].USAGE}'"
    if name not in names():
        hint = f"; did you mean 'folder:{name}'?" if _is_folder(name) else did_you_mean(name, names())
        return f"unknown dataset '{shortened(name)}'{hint}"
    return None


def missing(name: str, options: DataOptions) -> str | None:
    """Return instructions for getting a dataset that is not on this machine, or None if it is."""
    if name.startswith(huggingface.PREFIX):
        return huggingface.missing_library()
    return sources.missing(name, options) if name in sources.names() else None


def find(name: str, options: DataOptions, progress: Progress = SILENT) -> Source:
    """List the training and test images of a dataset without reading them."""
    if name in in_memory.NAMES:
        return in_memory.source_of(load(name, 8, options=options))
    listed = _listed(name, options, progress)
    return listed.source() if isinstance(listed, folder.Folder) else listed


def load(
    name: str, pixel_format: PixelFormat | int, *, options: DataOptions, progress: Progress = SILENT
) -> Dataset:
    """Load a dataset in a pixel format; an integer means squares with that many pixels per side.

    Small images are not enlarged. ``options.max_train_per_class`` is left to the caller: see
    ``Stream.limited``.
    """
    if isinstance(pixel_format, int):
        pixel_format = PixelFormat(pixel_format)
    if name in in_memory.NAMES:
        dataset = in_memory.load(name, pixel_format.side, options)
    else:
        listed = _listed(name, options, progress)
        dataset = read(listed, pixel_format, skip_unreadable=options.skip_unreadable, progress=progress)
    flip = dataset.flip if options.flip is None else options.flip
    crop = dataset.crop if options.crop is None else options.crop
    return replace(dataset, name=name, flip=flip, crop=crop)


def read(
    listed: Source | folder.Folder,
    pixel_format: PixelFormat,
    *,
    skip_unreadable: bool = False,
    progress: Progress = SILENT,
) -> Dataset:
    """Read the images of a source; one error lists all unreadable images.

    With ``skip_unreadable`` they are skipped and counted instead.
    """
    blocks = listed.blocks()
    loaded = load_small(blocks) or [
        load_samples(block, one, despite_faults=skip_unreadable, progress=progress)
        for block, one in zip(blocks, _formats(blocks, pixel_format), strict=True)
    ]
    usable = listed.usable([one.faults for one in loaded], skip_unreadable)
    train, test = _images(loaded[0], usable.train), _images(loaded[-1], usable.test)
    copies = [blocks[-1][row].name for row in _copies(loaded, train, test)]
    messages = list(usable.warnings)
    if copies:
        text = f"{counted(len(copies), 'test image')} also in the training part: accuracy will look too high"
        messages.append(f"{text} ({some(copies)})")
    for text in messages:
        warnings.warn(f"{listed.name}: {text}", CofimaWarning, stacklevel=3)
    facts = usable.facts | {
        "train_test_overlap": len(copies),
        "fingerprint": _fingerprint(loaded, train, test),
    }
    return Dataset(listed.name, usable.class_names, train, test, listed.flip, listed.crop, facts)


def _listed(name: str, options: DataOptions, progress: Progress) -> Source | folder.Folder:
    if problem := check(name, options.root):
        raise CofimaError(problem)
    if prefixed := _PREFIXED.get(_prefix(name)):
        found: Source | folder.Folder = prefixed.find(name, options, progress)
        return found
    if name in plugin.plugin_datasets():
        return plugin.find(name, options)
    return sources.find(name, options, progress)


def _prefix(name: str) -> str:
    return name[: name.find(":") + 1]


def _is_folder(name: str) -> bool:
    try:
        return Path(name).expanduser().is_dir()
    except (OSError, RuntimeError, ValueError):  # not a valid path
        return False


def _formats(blocks: Sequence[Sequence[Sample]], pixel_format: PixelFormat) -> list[PixelFormat]:
    """Return the format of each block; a block of test images does not need pixels for training crops."""
    tested = replace(pixel_format, only_tested=bool(pixel_format.whole))
    return [pixel_format] if len(blocks) == 1 else [pixel_format, tested]


def _images(loaded: Loaded, places: list[LabeledRow]) -> ImageSet:
    rows, labels = torch.tensor(places, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return ImageSet(loaded.pixels, rows.contiguous(), labels.contiguous())


def _copies(loaded: list[Loaded], train: ImageSet, test: ImageSet) -> list[int]:
    """Return the rows of test images that are copies of a training image."""
    learned = {loaded[0].hashes[row] for row in train.rows.tolist()}
    return [row for row in test.rows.tolist() if loaded[-1].hashes[row] in learned]


def _fingerprint(loaded: list[Loaded], train: ImageSet, test: ImageSet) -> str:
    """Return a hash of all images: in the order of a single block, or combined from each block's hash."""
    if len(loaded) == 1:
        both = join([train, test])
        return loaded[0].fingerprint(both.select(both.rows.argsort()))
    ends = [one.fingerprint(images) for one, images in zip(loaded, (train, test), strict=True)]
    return sha256("".join(ends).encode()).hexdigest()
