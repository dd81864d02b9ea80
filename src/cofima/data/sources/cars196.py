"""Stanford Cars: photographs of 196 models of cars."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cofima.core.errors import CofimaError, first_problems, problems
from cofima.data.download import RemoteFile
from cofima.data.loading.loader import Sample
from cofima.data.sources.base import Copy, DatasetInfo, Download, Source, folders_named
from cofima.data.sources.folder import TRAIN_AND_TEST, train_test_copies

COPIES = "https://github.com/pytorch/vision/issues/7545"
CITED = "tensorflow_datasets/url_checksums/cars196.txt"
FILES = {
    "car_devkit.tgz": (330_960, "b97deb463af7d58b6bfaa18b2a4de9829f0f79e8ce663dfa9261bf7810e9accd"),
    "cars_train.tgz": (979_269_282, "512b227b30e2f0a8aab9e09485786ab4479582073a144998da74d64b801fd288"),
    "cars_test.tgz": (977_350_468, "bffea656d6f425cba3c91c6d83336e4c5f86c6cffd8975b0f375d3a10da8e243"),
    "cars_test_annos_withlabels.mat": (
        185_758,
        "790f75be8ea34eeded134cc559332baf23e30e91367e9ddca97d26ed9b895f05",
    ),
}
INFO = DatasetInfo(
    name="cars196",
    title="Stanford Cars",
    classes=196,
    variants={"official": (8_144, 8_041)},
    layouts={
        "devkit": "stanford_cars/ with devkit/cars_train_annos.mat, cars_test_annos_withlabels.mat, "
        "cars_train/ and cars_test/",
        "annos": "cars196/ (or cars/) with cars_annos.mat and car_ims/",
        "folders": f"cars196/ with {TRAIN_AND_TEST}",
    },
    url=f"{COPIES} (the authors' own page is gone)",
    download=Download(
        "stanford_cars",
        tuple(
            RemoteFile(name, digest=f"sha256:{digest}", cited=CITED, size=size)
            for name, (size, digest) in FILES.items()
        ),
        by_hand="the authors' page, https://ai.stanford.edu/~jkrause/cars/car_dataset.html, is gone, and "
        f"{COPIES} tells where copies are",
    ),
    faults={
        (8_041, 8_144): (
            "swapped",
            "training and test images are swapped (8,041 + 8,144; official is 8,144 + 8,041), as by a public "
            "script that takes the flag 'test' for 'train'",
        )
    },
)
FOLDERS = ("cars196", "cars_196", "cars", "stanford_cars", "car196")
TRAIN, TEST, WHOLE = "cars_train_annos.mat", "cars_test_annos_withlabels.mat", "cars_annos.mat"


def find_copies(root: Path) -> Iterator[Copy]:
    """Yield the copies below a folder, without opening them."""
    folders = list(folders_named(root, FOLDERS))
    for folder in folders:
        if _either(folder, TRAIN) and _either(folder, TEST):
            yield Copy("devkit", folder, partial(_open_devkit, folder))
    for folder in folders:
        if _either(folder, WHOLE):
            yield Copy("annos", folder, partial(_open_annos, folder))
    yield from train_test_copies(INFO, folders)


def _open_devkit(folder: Path) -> Source:
    train, test = (_read(_either(folder, name), ("fname", "class")) for name in (TRAIN, TEST))
    rows = [(f"cars_train/{name}", int(car), False) for name, car in train]
    rows += [(f"cars_test/{name}", int(car), True) for name, car in test]
    return _source(folder, rows, _titles(_either(folder, "cars_meta.mat")))


def _open_annos(folder: Path) -> Source:
    file = _either(folder, WHOLE)
    rows = [
        (path, int(car), bool(test)) for path, car, test in _read(file, ("relative_im_path", "class", "test"))
    ]
    return _source(folder, rows, _titles(file) or _titles(_either(folder, "cars_meta.mat")))


def _source(folder: Path, rows: list[tuple[str, int, bool]], titles: list[str]) -> Source:
    """Return a source from rows of path, class id (starting at 1), and whether it is a test image."""
    most = max((car for _, car, _ in rows), default=0)
    titles = titles or [f"car {number:03}" for number in range(1, most + 1)]
    found = [f"{path}: no such file" for path, _, _ in rows if not (folder / path).is_file()]
    found += [
        f"{path}: class {car} is not within 1 to {len(titles)}"
        for path, car, _ in rows
        if not 0 < car <= len(titles)
    ]
    if found:
        raise first_problems(f"cars196 in {folder}", found)
    parts: tuple[list[Sample], list[Sample]] = [], []
    for path, car, tested in rows:
        parts[tested].append(Sample(path, car - 1, (folder / path).read_bytes))
    return INFO.source(parts, titles)


def _either(folder: Path, name: str) -> Path | None:
    """Return the file in a folder or in its ``devkit``, or None."""
    return next((path for path in (folder / "devkit" / name, folder / name) if path.is_file()), None)


def _titles(file: Path | None) -> list[str]:
    values = _matlab(file).get("class_names") if file else None
    return [] if values is None else [str(title).strip() for title in np.atleast_1d(values)]


def _read(file: Path | None, fields: tuple[str, ...]) -> list[tuple[Any, ...]]:
    assert file is not None
    table: NDArray[Any] = np.atleast_1d(_matlab(file).get("annotations", np.empty(0)))
    lacking = [field for field in fields if field not in (table.dtype.names or ())]
    if lacking:
        raise problems(str(file), [f"annotations: no field '{field}'" for field in lacking])
    return list(zip(*(table[field].tolist() for field in fields), strict=True))


def _matlab(file: Path) -> dict[str, Any]:
    from scipy.io import loadmat  # imported here: only this dataset needs it

    try:
        values: dict[str, Any] = loadmat(str(file), squeeze_me=True)
    except Exception as error:  # a damaged file may raise anything
        raise CofimaError(f"{file} is damaged, or not a MATLAB file of version 5 ({error})") from error
    return values
