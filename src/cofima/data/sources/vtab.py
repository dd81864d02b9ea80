"""VTAB for class-incremental learning: ten classes of each of five datasets, in the order of the datasets."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cofima.core.errors import problems
from cofima.data.loading.loader import Sample
from cofima.data.options import DataOptions
from cofima.data.sources.base import About, Copy, Source, named
from cofima.data.sources.folder import TRAIN_AND_TEST, has_train_and_test, split_folders
from cofima.data.sources.listing import duplicate_class_names, list_images

ABOUT = About(
    title="VTAB, five datasets of ten classes",
    classes=50,
    variants={"pilot": (1_796, 8_619)},
    layouts={
        "folders": f"vtab-cil/vtab/ (or vtab/) with {TRAIN_AND_TEST}, classes in the order of their names",
        "nested": "vtab/ with DATASET/train/CLASS/*.jpg and DATASET/test/CLASS/*.jpg (or val)",
    },
    url="https://github.com/LAMDA-CL/RevisitingCIL (the file vtab.zip)",
    flip=True,
    crop=0.5,
)
FOLDERS = ("vtab", "vtab-cil")
ORDER = ("resisc45", "dtd", "pets", "eurosat", "flowers")  # of the published benchmark


def look(root: Path) -> Iterator[Copy]:
    """Yield the copies below a folder."""
    folders = list(named(root, FOLDERS))
    for folder in folders:
        if has_train_and_test(folder):
            yield Copy("folders", folder, partial(_open_folders, folder))
    for folder in folders:
        if _parts(folder):
            yield Copy("nested", folder, partial(_open_nested, folder))


def _open_folders(folder: Path, options: DataOptions) -> Source:
    return _in_order(split_folders("vtab", ABOUT, folder, key=_numeric))


def _open_nested(folder: Path, options: DataOptions) -> Source:
    names: list[str] = []
    wrong: list[str] = []
    parts: tuple[list[Sample], list[Sample]] = [], []
    for part in _parts(folder):
        found = list_images(part)
        wrong += [f"{part.name}: {line}" for line in [*found.wrong, *duplicate_class_names(found)]]
        number = {name: len(names) + place for place, name in enumerate(sorted(found.folders, key=_numeric))}
        names += [f"{part.name}/{name}" for name in number]
        for file in found.files:
            picture = Sample(
                f"{part.name}/{file.part}/{file.key}", number[file.class_name], file.path.read_bytes
            )
            parts[file.part == "test"].append(picture)
    if wrong:
        raise problems(f"vtab in {folder}", wrong)
    return _in_order(ABOUT.make("vtab", parts, names))


def _in_order(source: Source) -> Source:
    source.facts["class_order"] = "given"  # the datasets arrive one after the other: no seed shuffles them
    return source


def _parts(folder: Path) -> list[Path]:
    found = [
        entry
        for entry in folder.iterdir()
        if entry.is_dir() and has_train_and_test(entry) and entry.name != "vtab"
    ]
    return sorted(found, key=lambda path: (_place(path.name), path.name))


def _place(name: str) -> int:
    return next((place for place, known in enumerate(ORDER) if known in name.casefold()), len(ORDER))


def _numeric(name: str) -> tuple[int, str]:
    """Sort numbers by their value, so that unpadded ones stay in the order of the datasets."""
    return (int(name), name) if name.isdecimal() else (-1, name)
