"""VTAB for class-incremental learning: ten classes from each of five datasets, in order of datasets."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cofima.core.errors import problems
from cofima.data.download import RemoteFile
from cofima.data.loading.loader import Sample
from cofima.data.sources.base import Copy, DatasetInfo, Download, Source, folders_named
from cofima.data.sources.folder import TRAIN_AND_TEST, has_train_and_test, train_test_copies
from cofima.data.sources.listing import list_images


def _numeric(name: str) -> tuple[int, str]:
    """Return a sort key by numeric value, so that unpadded numbers stay in the order of the datasets."""
    return (int(name), name) if name.isdecimal() else (-1, name)


REPOSITORY = "https://github.com/LAMDA-CL/RevisitingCIL"
INFO = DatasetInfo(
    name="vtab",
    title="VTAB, five datasets of ten classes",
    classes=50,
    variants={"pilot": (1_796, 8_619)},
    layouts={
        "folders": f"vtab-cil/vtab/ (or vtab/) with {TRAIN_AND_TEST}, classes in the order of their names",
        "nested": "vtab/ with DATASET/train/CLASS/*.jpg and DATASET/test/CLASS/*.jpg (or val)",
    },
    url=f"{REPOSITORY} (the file vtab.zip)",
    download=Download(
        "vtab-cil",
        (
            RemoteFile(
                "vtab.zip", digest="md5:a9c37bde6105a2516c900b0c33a437c1", cited=f"{REPOSITORY}/issues/5"
            ),
        ),
        terms=f"its authors say ({REPOSITORY}) that they have no right to distribute the images of its five "
        "datasets, whose own terms hold",
        by_hand="its authors share it through Google Drive and OneDrive, which need a browser; links are in "
        f"{REPOSITORY}",
    ),
    class_key=_numeric,
    fixed_order=True,  # the five datasets arrive one after the other
)
FOLDERS = ("vtab", "vtab-cil")
ORDER = ("resisc45", "dtd", "pets", "eurosat", "flowers")  # order of the published benchmark


def find_copies(root: Path) -> Iterator[Copy]:
    """Yield the copies below a folder, without opening them."""
    folders = list(folders_named(root, FOLDERS))
    yield from train_test_copies(INFO, folders)
    for folder in folders:
        if _parts(folder):
            yield Copy("nested", folder, partial(_open_nested, folder))


def _open_nested(folder: Path) -> Source:
    names: list[str] = []
    wrong: list[str] = []
    parts: tuple[list[Sample], list[Sample]] = [], []
    for part in _parts(folder):
        found = list_images(part)
        wrong += [f"{part.name}: {line}" for line in found.wrong]
        number = {name: len(names) + place for place, name in enumerate(sorted(found.folders, key=_numeric))}
        names += [f"{part.name}/{name}" for name in number]
        for file in found.files:
            name = f"{part.name}/{file.part}/{file.key}"
            sample = Sample(name, number[file.class_name], file.path.read_bytes)
            parts[file.part == "test"].append(sample)
    if wrong:
        raise problems(f"vtab in {folder}", wrong)
    return INFO.source(parts, names)


def _parts(folder: Path) -> list[Path]:
    """Return the folders of the five datasets, in the published order."""

    def place(path: Path) -> tuple[int, str]:
        known = (n for n, name in enumerate(ORDER) if name in path.name.casefold())
        return next(known, len(ORDER)), path.name

    return sorted((p for p in folder.iterdir() if has_train_and_test(p) and p.name != "vtab"), key=place)
