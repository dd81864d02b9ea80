"""Download and unpacking of public datasets, verified against published digests and counts."""

import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cofima.core.atomic import remove_aside, write_aside
from cofima.core.errors import CofimaError, CofimaWarning, did_you_mean
from cofima.core.lock import folder_lock
from cofima.core.paths import expand
from cofima.core.progress import SILENT, Progress
from cofima.data import sources
from cofima.data.archive import is_archive, unpack
from cofima.data.download import RemoteFile, download, verify
from cofima.data.options import DataOptions
from cofima.data.sources.base import Download, Source
from cofima.data.sources.checks import count_problem

WORK = "downloads"  # folder below the root for unfinished downloads


@dataclass(frozen=True)
class Obtained:
    """Dataset on this machine.

    Attributes:
        source: Images of the dataset.
        files: Result of the verification of each downloaded file; empty if the dataset already existed.
    """

    source: Source
    files: dict[str, str]


def names() -> list[str]:
    """Return the datasets whose published files are known, including those to be downloaded by hand."""
    return [name for name in sources.names() if sources.info(name).download is not None]


def obtain(
    name: str,
    root: Path,
    *,
    place: str | None = None,
    accept_license: bool = False,
    progress: Progress = SILENT,
) -> Obtained:
    """Download a dataset into a folder if it does not exist there; atomically, all of it or nothing.

    An interrupted call leaves its downloads in ``root/downloads``, and the next call resumes them.

    Args:
        name: A name from :func:`names`.
        root: Folder of the datasets.
        place: Alternative source of the published files: a folder, or a web address below which they are.
            They are verified against the published digests as well.
        accept_license: The user accepts the terms of the dataset.
        progress: Progress display.
    """
    plan = _plan(name)
    options = DataOptions(root=root)
    if sources.copies(name, root):
        return Obtained(sources.find(name, options, progress), {})
    if place is None and (lacking := [file.name for file in plan.files if not file.url]):
        raise CofimaError(
            f"{name} has to be fetched by hand: {plan.by_hand}; put {', '.join(lacking)} into a folder, and "
            f"say: cofima data get {name} --from FOLDER --data-root {root}"
        )
    if plan.terms and not accept_license:
        raise CofimaError(f"{name}: {plan.terms}; accept this with --accept-license")
    if (root / plan.target).exists():
        raise CofimaError(f"{root / plan.target} is there, and is no copy of {name}: move it away")
    work = root / WORK / name
    with folder_lock(work):
        known = _bring(plan, work, place, progress)
        with progress.stage(f"unpacking {name}"):
            ready = _unpacked(plan, work, place)
        _check(name, ready, known)
        with write_aside(root / plan.target) as aside:
            ready.replace(aside)
        _clear(work)
    for folder in (work, work.parent):
        with suppress(OSError):  # not empty: another dataset is being downloaded
            folder.rmdir()
    return Obtained(sources.find(name, options, progress), known)


def _plan(name: str) -> Download:
    known = names()
    if name not in known:
        raise CofimaError(f"{name} is no dataset that can be fetched{did_you_mean(name, known)}")
    plan = sources.info(name).download
    assert plan is not None  # true for all names above
    return plan


def _bring(plan: Download, work: Path, place: str | None, progress: Progress) -> dict[str, str]:
    """Download every file of a dataset, or find it in a folder; return the result of each verification."""
    known: dict[str, str] = {}
    for file in plan.files:
        path = _local(file, work, place)
        if path.parent == work and not path.exists():
            download(file, _address(file, place), path, progress)
        elif not path.is_file():
            raise CofimaError(f"{path}: there is no such file; --from needs {_listed(plan.files)}")
        with progress.stage(f"checking {file.name}"):
            known[file.name] = _verified(file, path, ours=path.parent == work)
    return known


def _verified(file: RemoteFile, path: Path, ours: bool) -> str:
    try:
        return verify(file, path)
    except CofimaError as error:
        if not ours:
            raise
        path.unlink()
        raise CofimaError(f"{error}; it was removed, and the same command gets it again") from error


def _local(file: RemoteFile, work: Path, place: str | None) -> Path:
    """Return the path of a file, before or after it is downloaded."""
    if place is None or _is_address(place):
        return work / file.name
    return expand(place) / file.name


def _address(file: RemoteFile, place: str | None) -> str:
    return file.url if place is None else f"{place.rstrip('/')}/{file.name}"


def _is_address(place: str) -> bool:
    return "://" in place and bool(urlsplit(place).scheme)


def _listed(files: Sequence[RemoteFile]) -> str:
    return ", ".join(file.name for file in files)


def _unpacked(plan: Download, work: Path, place: str | None) -> Path:
    """Unpack the files of a dataset; return the folder or file to be moved to its final place."""
    new = work / "unpacked"
    remove_aside(new)  # left by a killed process
    for file in plan.files:
        path = _local(file, work, place)
        if is_archive(file.name) and file.name != plan.target:
            unpack(path, new / plan.target)
        else:
            to = new / (plan.target if file.name == plan.target else f"{plan.target}/{file.name}")
            _copy(path, to, ours=path.parent == work)
    # an archive may contain the folder under its final name, next to files that are not needed
    inner = new / plan.target / plan.target
    return inner if inner.is_dir() else new / plan.target


def _copy(path: Path, to: Path, ours: bool) -> None:
    """Copy a file; one of our own downloads is hard-linked instead, if possible, to save space."""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not ours:
                raise OSError
            to.hardlink_to(path)
        except OSError:
            shutil.copyfile(path, to)
    except OSError as error:
        raise CofimaError(f"{path} could not be copied to {to} ({error.strerror})") from error


def _check(name: str, ready: Path, known: dict[str, str]) -> None:
    """Raise if the files are not a valid copy, or are unverified and differ from the published counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CofimaWarning)  # repeated below, for the final folder
        source = sources.find(name, DataOptions(root=ready.parent))
    wrong = count_problem(source, sources.info(name))
    if wrong and any(text.startswith("unverified") for text in known.values()):
        raise CofimaError(f"{name} as it was fetched has {wrong}; nothing was kept of it")


def _clear(work: Path) -> None:
    """Remove the downloaded files, but not those of the lock."""
    for path in work.iterdir():
        if not path.name.startswith(".lock"):
            remove_aside(path)
