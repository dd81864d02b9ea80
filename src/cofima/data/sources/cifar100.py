"""CIFAR-100: 32 x 32 photographs of 100 classes, in its authors' Python version."""

import tarfile
import zlib
from collections.abc import Iterator
from functools import partial
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np

from cofima.core.errors import CofimaError, file_error, problems
from cofima.data.download import RemoteFile
from cofima.data.loading.loader import Sample
from cofima.data.sources.base import (
    Copy,
    DatasetInfo,
    Download,
    Source,
    files_named,
    folders_named,
    numbered_samples,
)
from cofima.data.sources.unpickle import plain_dict

URL = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
INFO = DatasetInfo(
    name="cifar100",
    title="CIFAR-100",
    classes=100,
    variants={"official": (50_000, 10_000)},
    layouts={
        "python": "cifar-100-python/ with the files train, test and meta",
        "archive": "cifar-100-python.tar.gz",
    },
    url=URL,
    crop=0.08,
    download=Download(
        "cifar-100-python",
        (
            RemoteFile(
                "cifar-100-python.tar.gz",
                URL,
                "md5:eb9058c3a382ffc7106e4002c42a8d85",
                "torchvision/datasets/cifar.py",
            ),
        ),
    ),
)
MOST_BYTES = 200_000_000  # maximum size of a file in the archive; the largest has 155 million
FOLDERS = ("cifar-100-python", "cifar100", "cifar-100")
MD5 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}


def find_copies(root: Path) -> Iterator[Copy]:
    """Yield the copies below a folder, without opening them."""
    for folder in folders_named(root, FOLDERS):
        if all((folder / name).is_file() for name in MD5):
            yield Copy("python", folder, partial(_open, folder))
    for archive in files_named(root, FOLDERS, ("cifar-100-python.tar.gz",)):
        yield Copy("archive", archive, partial(_open, archive))


def _open(path: Path) -> Source:
    contents = _unpacked(path) if path.is_file() else _contents(path)
    found: list[str] = []
    values = {name: _values(name, content, found) for name, content in contents.items()}
    if found:
        raise problems(f"cifar100 in {path}", found)
    intact = all(md5(contents[name], usedforsecurity=False).hexdigest() == MD5[name] for name in MD5)
    names = values["meta"]["fine_label_names"]
    parts = _samples("train", values["train"]), _samples("test", values["test"])
    return INFO.source(parts, names, "official" if intact else "other")


def _samples(part: str, values: dict[str, Any]) -> list[Sample]:
    images = values["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return numbered_samples(part, values["fine_labels"], lambda n: np.ascontiguousarray(images[n]))


def _contents(folder: Path) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in MD5}
    except OSError as error:
        raise file_error(error.filename, error) from error


def _unpacked(archive: Path) -> dict[str, bytes]:
    """Read the three files of the archive into memory."""
    wanted = {f"cifar-100-python/{name}": name for name in MD5}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if member.name not in wanted:
                    continue
                # no links, which may point anywhere or form a cycle, and no sparse files of any size
                if not member.isreg() or member.issparse() or member.size > MOST_BYTES:
                    raise tarfile.ReadError(f"{member.name} is not a file of CIFAR-100")
                file = tar.extractfile(member)
                assert file is not None  # true for every regular file
                found[wanted[member.name]] = file.read()
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
        raise CofimaError(f"{archive} is damaged or not complete ({error}); get it again") from error
    lacking = [f"{name}: the file is missing" for name in MD5 if name not in found]
    if lacking:
        raise problems(f"cifar100 in {archive}", lacking)
    return found


def _values(name: str, content: bytes, found: list[str]) -> dict[str, Any]:
    """Return the values of a file; append its problem, if any, to ``found``."""
    try:
        values = plain_dict(content)
        wrong = _wrong_meta(values) if name == "meta" else _wrong_part(values)
    except (ValueError, KeyError, TypeError) as error:
        values, wrong = {}, f"not a file of CIFAR-100 ({error})"
    found.extend([f"{name}: {wrong}"] if wrong else [])
    return values


def _wrong_meta(values: dict[str, Any]) -> str:
    names = values["fine_label_names"]
    good = (
        isinstance(names, list) and len(set(names)) == len(names) and all(isinstance(n, str) for n in names)
    )
    return "" if good else "fine_label_names is not a list of different names"


def _wrong_part(values: dict[str, Any]) -> str:
    data, labels = values["data"], values["fine_labels"]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (len(labels), 3072):
        shape = getattr(data, "shape", type(data).__name__)
        return f"expected {len(labels)} x 3072 bytes of pixels, found {shape}"
    return "" if all(isinstance(n, int) and 0 <= n < 100 for n in labels) else "a label is not within 0 to 99"
