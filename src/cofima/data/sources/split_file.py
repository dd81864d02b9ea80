"""Split files: manifests written by ``cofima data prepare``, pairs of lists, and lists of test images."""

import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from cofima.core import plain_yaml
from cofima.core.atomic import cache_folder, write_text
from cofima.core.errors import CofimaError, CofimaWarning, file_error, first_problems
from cofima.data.loading.loader import Sample
from cofima.data.sources.base import Source
from cofima.data.sources.checks import Contents

FORMAT = 1  # version of the manifest format
_MOST_CHARACTERS = 200_000_000  # enough for millions of images


def split_by_file(source: Source, file: Path) -> Source:
    """Return the source with its images split as a file says.

    The file is a manifest of ``cofima data prepare`` (.jsonl), a YAML or JSON file with the lists
    ``train`` and ``test``, a folder with the lists ``*_train.yaml`` and ``*_test.yaml`` (keys ``data`` and
    ``targets``), or a text file with the name of one test image per line.
    """
    with _explained(file):
        train, test = _lists(file)
    return split_by_names(source, file.stem, train, test, str(file))


def split_by_names(
    source: Source, variant: str, train: Iterable[str] | None, test: Iterable[str], where: str
) -> Source:
    """Return the source split by image names; if ``train`` is None, all others are training images."""
    everything = {picture.name: picture for picture in [*source.train, *source.test]}
    unknown: list[str] = []
    tested = _take(everything, test, unknown)
    if train is None:
        train = everything.keys() - tested.keys()
    learned = _take(everything, train, unknown)
    if unknown:
        raise first_problems(where, [f"{name}: there is no such image" for name in unknown])
    if both := sorted(learned.keys() & tested.keys()):
        raise first_problems(where, [f"{name}: both trained and tested on" for name in both])
    if unused := len(everything) - len(learned) - len(tested):
        warnings.warn(f"{where}: {unused} images of {source.name} are in neither list", CofimaWarning, 4)
    facts = source.facts | {"split": f"listed: {variant}", "split_seed": None}
    ordered = [sorted(part.values(), key=lambda p: (p.label, p.name)) for part in (learned, tested)]
    return replace(source, variant=variant, train=ordered[0], test=ordered[1], facts=facts)


def two_lists(folder: Path) -> tuple[list[str], list[str]]:
    """Read the lists ``*_train.yaml`` and ``*_test.yaml`` of a folder."""
    with _explained(folder):
        train = next(iter(sorted(folder.glob("*_train.yaml"))), None)
        test = train and train.with_name(train.name.replace("_train.yaml", "_test.yaml"))
        if train is None or test is None or not test.is_file():
            raise ValueError("the folder needs both *_train.yaml and *_test.yaml")
        return _names(_parsed(train)["data"]), _names(_parsed(test)["data"])


def write_manifest(source: Source, contents: Contents, folder: Path | None = None) -> Path:
    """Write name, label, part and hash of every image of a source as JSON lines; return the path.

    The first line identifies the split and contains a hash of the others.
    """
    rows = "".join(f"{json.dumps(row)}\n" for row in _rows(source, contents))
    head = {
        "format": FORMAT,
        "dataset": source.name,
        "split_id": source.facts["split_id"],
        "split_hash": source.facts["split_hash"],
        "classes": source.class_names,
        "train": len(source.train),
        "test": len(source.test),
        "test_images_in_train": len(contents.shared),
        "sha256": sha256(rows.encode()).hexdigest(),
    }
    folder = cache_folder() / "splits" if folder is None else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_error(folder, error) from error
    name = "".join(letter if letter.isalnum() or letter in "+.-_" else "-" for letter in head["split_id"])
    path = folder / f"{name}.jsonl"
    write_text(path, f"{json.dumps(head)}\n{rows}")
    return path


def read_manifest(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header and rows of a manifest; raise if it was modified or truncated."""
    try:
        first, _, rest = path.read_text("utf-8").partition("\n")
        head = json.loads(first)
        intact = head["format"] == FORMAT and head["sha256"] == sha256(rest.encode()).hexdigest()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CofimaError(f"{path} is not a manifest of a split ({error})") from error
    if not intact:
        raise CofimaError(f"{path} was changed or cut: its hash is not that of its lines; write it again")
    return head, [json.loads(line) for line in rest.splitlines()]


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Convert errors in a split file to a :class:`CofimaError`."""
    try:
        yield
    except OSError as error:
        raise file_error(file, error) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CofimaError(f"{file} is not a split file ({error})") from error


def _lists(file: Path) -> tuple[list[str] | None, list[str]]:
    if file.is_dir():
        return two_lists(file)
    if file.exists() and not file.is_file():  # reading it might block forever
        raise ValueError("it is a pipe or a device")
    if file.suffix == ".jsonl":
        rows = read_manifest(file)[1]
        parts = {part: [row["name"] for row in rows if row["split"] == part] for part in ("train", "test")}
        return parts["train"], parts["test"]
    if file.suffix in (".yaml", ".yml", ".json"):
        values = _parsed(file)
        return _names(values["train"]), _names(values["test"])
    lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
    return None, [line for line in lines if line]


def _parsed(file: Path) -> dict[str, Any]:
    values = plain_yaml.parse(file.read_text("utf-8"), _MOST_CHARACTERS)
    if not isinstance(values, dict):
        raise TypeError(f"{file.name}: expected keys and lists")
    return values


def _names(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("expected a list of image names")
    return values


def _take(everything: dict[str, Sample], names: Iterable[str], unknown: list[str]) -> dict[str, Sample]:
    """Find images by name, or by the last two components of a path from another machine."""
    found = {}
    for name in names:
        short = "/".join(name.split("/")[-2:])
        picture = everything.get(name) or everything.get(short)
        if picture is None:
            unknown.append(name)
        else:
            found[picture.name] = picture
    return found


def _rows(source: Source, contents: Contents) -> Iterator[dict[str, Any]]:
    for split in ("train", "test"):
        for picture, digest in zip(getattr(source, split), getattr(contents, split), strict=True):
            yield {"split": split, "name": picture.name, "label": picture.label, "sha256": digest}
