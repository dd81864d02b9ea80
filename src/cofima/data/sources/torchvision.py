"""Dataset classes of torchvision by name: ``torchvision:Flowers102``."""

import inspect
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cofima.core.errors import CofimaError, did_you_mean
from cofima.core.progress import SILENT, Progress
from cofima.data.loading.decoder import BadImageError
from cofima.data.options import DataOptions
from cofima.data.sources.base import Source, numbered_samples, search_roots
from cofima.data.sources.checks import checked
from cofima.data.sources.foreign_code import restrained

PREFIX, USAGE = "torchvision:", "torchvision:CLASS"
DESCRIPTION = "a dataset of torchvision that has been downloaded, such as torchvision:Flowers102"
_LABELS = ("targets", "_labels", "labels", "_targets", "y")
_SUPPLIED = ("root", "train", "split", "transform", "target_transform", "download", "self")


def check(name: str, root: Path | None = None) -> str | None:
    """Return the problem with the name, or None if it is valid."""
    known = _classes()
    kind = name.removeprefix(PREFIX)
    if kind in known and _unpickles(known[kind]):
        return f"dataset '{name}' is not read: it unpickles a file of its folder, which could run any code"
    return None if kind in known else f"unknown dataset '{name}'{did_you_mean(kind, known)}"


def find(name: str, options: DataOptions, progress: Progress = SILENT) -> Source:
    """List the images of a downloaded torchvision dataset."""
    kind = _classes()[name.removeprefix(PREFIX)]
    tried: list[str] = []
    for root in search_roots(options.root):
        try:
            with restrained():
                train, test, variant = _make(kind, root)
        except BadImageError as error:
            raise CofimaError(f"{name} in {root} is not read: {error}") from error
        except (RuntimeError, OSError, ValueError) as error:
            tried.append(f"    {root}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            continue
        return _source(name, variant, (train, test), root, options, progress)
    get = f"torchvision.datasets.{kind.__name__}(ROOT, download=True)"
    raise CofimaError(
        "\n".join([f"dataset {name} was not found in", *tried, f"  If it can be had by {get}, do so."])
    )


def _classes() -> dict[str, Any]:
    """Return the dataset classes that need no arguments other than root and split, by name."""
    from torchvision import datasets

    found = {name: getattr(datasets, name) for name in datasets.__all__}
    return {name: kind for name, kind in found.items() if inspect.isclass(kind) and _usable(kind)}


def _usable(kind: Any) -> bool:
    arguments = inspect.signature(kind.__init__).parameters
    needed = {key for key, one in arguments.items() if one.default is one.empty and one.kind not in (2, 4)}
    return "root" in arguments and needed <= set(_SUPPLIED)


def _unpickles(kind: Any) -> bool:
    """Return True if a class loads a pickle without first comparing it with a published hash."""
    source = inspect.getsource(sys.modules[kind.__module__])
    return "pickle.load" in source and not hasattr(kind, "_check_integrity")


def _make(kind: Any, root: Path) -> tuple[Any, Any, str]:
    """Build the training and test part according to the signature; a class without parts is one part."""
    arguments = inspect.signature(kind.__init__).parameters
    if "train" in arguments:
        return kind(str(root), train=True), kind(str(root), train=False), "official"
    if "split" not in arguments:
        return kind(str(root)), None, "all"
    train = kind(str(root), split="train")
    for split in ("test", "val", "valid"):
        try:
            return train, kind(str(root), split=split), f"train+{split}"
        except ValueError:  # the class has no such split
            continue
    raise RuntimeError("it has a split 'train', but no test, val or valid")


def _source(
    name: str, variant: str, parts: tuple[Any, Any], root: Path, options: DataOptions, progress: Progress
) -> Source:
    labels = [_labels(part, progress) if part is not None else [] for part in parts]
    names = getattr(parts[0], "classes", None) or ()
    names = tuple(str(one) if isinstance(one, str) else " ".join(map(str, one)) for one in names)
    most = max(map(max, filter(None, labels)), default=-1)
    if len(names) <= most:
        names = tuple(map(str, range(most + 1)))
    train, test = (
        numbered_samples(name, values, partial(_pixels, part), digits=6)
        for name, part, values in zip(("train", "test"), parts, labels, strict=True)
    )
    facts = {"split": "given", "split_seed": None, "folder": str(root.resolve())}
    source = Source(name, variant, names, train, test, flip=True, crop=0.5, facts=facts)
    return checked(source, options, root)


def _labels(part: Any, progress: Progress) -> list[int]:
    """Return the labels, without decoding images if the dataset stores labels separately."""
    kept = next((getattr(part, key) for key in _LABELS if hasattr(part, key)), None)
    if kept is None or len(kept) != len(part):
        places = progress.track(range(len(part)), len(part), "reading labels")
        kept = [_item(part, place)[1] for place in places]
    try:
        return [int(label) for label in kept]
    except (TypeError, ValueError) as error:
        raise CofimaError(
            f"torchvision:{type(part).__name__} has no single class for each image, but {kept[0]!r}"
        ) from error


def _pixels(part: Any, number: int) -> NDArray[np.uint8]:
    with restrained():  # Pillow loads lazily: convert may be what decodes the image
        return np.asarray(part[number][0].convert("RGB"))


def _item(part: Any, number: int) -> Any:
    with restrained():
        return part[number]
