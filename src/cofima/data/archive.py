"""Safe unpacking of untrusted archives: regular files only, below one folder, of bounded size."""

import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from cofima.core.errors import CofimaError
from cofima.core.names import shortened

TARS, ZIP = (".tar", ".tgz", ".tar.gz"), ".zip"
RATIO, EXTRA = 3, 100_000_000  # photographs hardly compress: an archive that expands more is not a dataset
MOST_FILES = 500_000
DAMAGED = (tarfile.TarError, zipfile.BadZipFile, EOFError, ValueError, RuntimeError, zlib.error, LZMAError)


class Member(NamedTuple):
    """Regular file in an archive."""

    name: str
    size: int
    open: Callable[[], IO[bytes] | None]


def is_archive(name: str) -> bool:
    """Return True if :func:`unpack` supports a file of this name."""
    return name.endswith((*TARS, ZIP))


def unpack(archive: Path, folder: Path) -> None:
    """Write the files of a tar or zip archive below a folder; none of them may exist yet.

    Links, devices and names that point outside of the folder are refused. Only names and contents of bounded
    size are taken from the archive, not modes, owners or times.
    """
    left = RATIO * archive.stat().st_size + EXTRA
    try:
        for count, member in enumerate(_members(archive)):
            left -= member.size
            if left < 0 or count == MOST_FILES:
                raise ValueError("it unpacks to far more than a dataset of its size")
            _write(member, folder)
    except DAMAGED as error:
        raise CofimaError(f"{archive} cannot be unpacked ({error})") from error
    except OSError as error:
        reason = error.strerror or error
        raise CofimaError(f"{archive} could not be unpacked into {folder} ({reason})") from error


def _members(archive: Path) -> Iterator[Member]:
    return _in_zip(archive) if archive.name.endswith(ZIP) else _in_tar(archive)


def _in_tar(archive: Path) -> Iterator[Member]:
    with tarfile.open(archive) as tar:
        for entry in tar:
            if entry.isdir():
                continue
            if not entry.isreg() or entry.issparse():
                raise ValueError(f"{shortened(entry.name)} is a link or no file")
            yield Member(entry.name, entry.size, lambda entry=entry: tar.extractfile(entry))  # type: ignore[misc]


def _in_zip(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as packed:
        for entry in packed.infolist():
            if entry.is_dir():
                continue
            if stat.S_ISLNK(entry.external_attr >> 16):  # the upper half is the Unix mode
                raise ValueError(f"{shortened(entry.filename)} is a link")
            yield Member(entry.filename, entry.file_size, lambda entry=entry: packed.open(entry))  # type: ignore[misc]


def _write(member: Member, folder: Path) -> None:
    """Write one file; both libraries read no more than the size given in the archive."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or not name.parts or any(c in member.name for c in "\\:\0"):
        raise ValueError(f"the name {shortened(member.name)} leads out of the folder")
    path = folder.joinpath(*name.parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    source = member.open()
    assert source is not None  # true for every regular file
    with source, path.open("xb") as file:  # "x": never over another member, nor through a link
        shutil.copyfileobj(source, file, 1 << 20)
