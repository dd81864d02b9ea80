"""A split that a file gives: a manifest, two lists, or the list of what is tested on."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cofima.data import manifest
from cofima.data.source import Picture, Source
from cofima.errors import CofimaError, CofimaWarning, first_problems

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # tens of thousands of lines


def redeal(source: Source, file: Path) -> Source:
    """Return the source with its images trained and tested on as a file says.

    The file is a manifest of ``cofima data prepare`` (.jsonl), a YAML or JSON file with the lists
    ``train`` and ``test``, a folder with the lists ``*_train.yaml`` and ``*_test.yaml`` (keys ``data`` and
    ``targets``), or a text file with the name of one test image in each line.
    """
    with _explained(file):
        train, test = _lists(file)
    return deal(source, file.stem, train, test, str(file))


def deal(
    source: Source, variant: str, train: Iterable[str] | None, test: Iterable[str], where: str
) -> Source:
    """Return the source with the images of these names trained and tested on; without ``train``, the rest."""
    everything = {picture.name: picture for picture in [*source.train, *source.test]}
    unknown: list[str] = []
    tested = _take(everything, test, unknown)
    kept = everything.keys() - tested.keys()
    learnt = {name: everything[name] for name in kept} if train is None else _take(everything, train, unknown)
    if unknown:
        raise first_problems(where, [f"{name}: there is no such image" for name in unknown])
    if both := sorted(learnt.keys() & tested.keys()):
        raise first_problems(where, [f"{name}: both trained and tested on" for name in both])
    if unused := len(everything) - len(learnt) - len(tested):
        warnings.warn(f"{where}: {unused} images of {source.name} are in neither list", CofimaWarning, 4)
    facts = source.facts | {"split": f"listed: {variant}", "split_seed": None}
    ordered = [sorted(part.values(), key=lambda p: (p.label, p.name)) for part in (learnt, tested)]
    return replace(source, variant=variant, train=ordered[0], test=ordered[1], facts=facts)


def two_lists(folder: Path) -> tuple[list[str], list[str]]:
    """Read the lists ``*_train.yaml`` and ``*_test.yaml`` of a folder."""
    with _explained(folder):
        train = next(iter(sorted(folder.glob("*_train.yaml"))), None)
        test = train and train.with_name(train.name.replace("_train.yaml", "_test.yaml"))
        if train is None or test is None or not test.is_file():
            raise ValueError("the folder needs both *_train.yaml and *_test.yaml")
        return _names(_parsed(train)["data"]), _names(_parsed(test)["data"])


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Say what is wrong with a file in one sentence."""
    try:
        yield
    except OSError as error:
        raise CofimaError(f"{file}: {(error.strerror or str(error)).lower()}") from error
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        raise CofimaError(f"{file} is not a split file ({error})") from error


def _lists(file: Path) -> tuple[list[str] | None, list[str]]:
    if file.is_dir():
        return two_lists(file)
    if file.suffix == ".jsonl":
        rows = manifest.read(file)[1]
        parts = {part: [row["name"] for row in rows if row["split"] == part] for part in ("train", "test")}
        return parts["train"], parts["test"]
    if file.suffix in (".yaml", ".yml", ".json"):
        values = _parsed(file)
        return _names(values["train"]), _names(values["test"])
    lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
    return None, [line for line in lines if line]


def _parsed(file: Path) -> dict[str, Any]:
    values = yaml.load(file.read_text("utf-8"), _LOADER)
    if not isinstance(values, dict):
        raise TypeError(f"{file.name}: expected keys and lists")
    return values


def _names(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("expected a list of image names")
    return values


def _take(everything: dict[str, Picture], names: Iterable[str], unknown: list[str]) -> dict[str, Picture]:
    """Find images by name, or by the last two parts of a path that was made on another machine."""
    found = {}
    for name in names:
        short = "/".join(name.split("/")[-2:])
        picture = everything.get(name) or everything.get(short)
        if picture is None:
            unknown.append(name)
        else:
            found[picture.name] = picture
    return found
