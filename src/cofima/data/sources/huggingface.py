"""Datasets of the Hugging Face hub, or local folders in its formats: ``hf:NAME``."""

from functools import partial
from pathlib import Path
from typing import Any

from cofima.core.errors import CofimaError
from cofima.core.hub import quick_hub
from cofima.core.progress import SILENT, Progress
from cofima.data.loading.decoder import read_file
from cofima.data.loading.loader import Sample
from cofima.data.options import DataOptions
from cofima.data.sources.base import Source, numbered_samples, search_roots
from cofima.data.sources.checks import checked

PREFIX, USAGE = "hf:", "hf:NAME"
DESCRIPTION = "a dataset of the Hugging Face hub (NAME or NAME@CONFIGURATION), or a folder in its formats"
_TESTS = ("test", "validation", "valid", "val")
_LABELS = ("label", "fine_label", "labels")


def check(name: str, root: Path | None = None) -> str | None:
    """Return the problem with the name, or None if it is valid."""
    return None if name.removeprefix(PREFIX).strip() else f"dataset '{name}' needs a name: 'hf:NAME'"


def missing_library() -> str | None:
    """Return a message if the library is not installed, else None."""
    from importlib.util import find_spec

    return None if find_spec("datasets") else "hf:NAME needs the library datasets: pip install 'cofima[hf]'"


def find(name: str, options: DataOptions, progress: Progress = SILENT) -> Source:
    """List the images of a dataset, given its name on the hub, ``NAME`` or ``NAME@CONFIGURATION``.

    A folder of this name below ``data.root``, $COFIMA_DATA or the working directory takes precedence.
    """
    if problem := missing_library():
        raise CofimaError(problem)
    path, _, configuration = name.removeprefix(PREFIX).partition("@")
    local = next((place / path for place in search_roots(options.root) if (place / path).is_dir()), None)
    loaded = _load(str(local or path), configuration or None)
    if "train" not in loaded:
        raise CofimaError(f"{name}: there is no split 'train', only {', '.join(map(str, loaded))}")
    image, label = _columns(name, loaded["train"].features)
    test = next((split for split in _TESTS if split in loaded), None)
    parts = [_samples(split, loaded[split], image, label) if split else [] for split in ("train", test)]
    names = tuple(loaded["train"].features[label].names)
    variant = f"train+{test}" if test else "all"
    facts = {"split": "given", "split_seed": None, "column": label}
    source = Source(name, variant, names, parts[0], parts[1], flip=True, crop=0.5, facts=facts)
    return checked(source, options, Path(path))


def _load(path: str, configuration: str | None) -> Any:
    from datasets import load_dataset

    try:
        with quick_hub():
            return load_dataset(path, configuration)
    except Exception as error:  # the library raises errors of many kinds
        raise CofimaError(f"hf:{path} could not be loaded: {error}") from error


def _columns(name: str, features: Any) -> tuple[str, str]:
    """Return the names of the image column and the class column."""
    from datasets import ClassLabel, Image

    images = [key for key, feature in features.items() if isinstance(feature, Image)]
    labels = [key for key, feature in features.items() if isinstance(feature, ClassLabel)]
    if len(labels) > 1:
        labels = [key for key in _LABELS if key in labels][:1] or labels
    if len(images) != 1 or len(labels) != 1:
        raise CofimaError(
            f"{name}: one column of images and one of class labels are needed, found {images or 'no'} images "
            f"and {labels or 'no'} class labels among the columns {', '.join(features)}"
        )
    return images[0], labels[0]


def _samples(split: str, rows: Any, image: str, label: str) -> list[Sample]:
    from datasets import Image

    encoded = rows.cast_column(image, Image(decode=False))
    return numbered_samples(split, map(int, rows[label]), partial(_read, encoded, image), digits=6)


def _read(rows: Any, image: str, number: int) -> bytes:
    found = rows[number][image]
    content = found["bytes"]
    return read_file(Path(found["path"])) if content is None else bytes(content)
