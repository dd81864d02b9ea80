"""Getting a public dataset: its files, compared with what is published, in a layout that is read here."""

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

WORK = "downloads"  # the folder below the root that holds what is not finished


@dataclass(frozen=True)
class Obtained:
    """A dataset on this machine.

    Attributes:
        source: Its images.
        files: What is known of each downloaded file, in words; empty if the dataset was there before.
    """

    source: Source
    files: dict[str, str]


def names() -> list[str]:
    """Return the datasets whose files are known, whether or not a program can fetch them."""
    return [name for name in sources.names() if sources.info(name).download is not None]


def obtain(
    name: str,
    root: Path,
    *,
    place: str | None = None,
    accept_license: bool = False,
    progress: Progress = SILENT,
) -> Obtained:
    """Get a dataset into a folder, if it is not there: all of it, or nothing under its name.

    What an interrupted call downloaded is in ``root/downloads``, and the next one goes on with it.

    Args:
        name: A name from :func:`names`.
        root: The folder of the datasets.
        place: A folder with the published files, or a web address below which they are, in place of the
            official ones. They are compared with the published digests all the same.
        accept_license: The user accepts the terms of the dataset.
        progress: Receives the progress of the work.
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
        with suppress(OSError):  # another dataset is being fetched
            folder.rmdir()
    return Obtained(sources.find(name, options, progress), known)


def _plan(name: str) -> Download:
    known = names()
    if name not in known:
        raise CofimaError(f"{name} is no dataset that can be fetched{did_you_mean(name, known)}")
    plan = sources.info(name).download
    assert plan is not None  # as of all that are named
    return plan


def _bring(plan: Download, work: Path, place: str | None, progress: Progress) -> dict[str, str]:
    """Bring every file of a dataset here, or find it in a folder; return what is known of each."""
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
    """Return where a file is, or will be once it is downloaded."""
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
    """Unpack the files of a dataset; return the folder or file that is to get its name."""
    new = work / "unpacked"
    remove_aside(new)  # of a process that was killed
    for file in plan.files:
        path = _local(file, work, place)
        if is_archive(file.name) and file.name != plan.target:
            unpack(path, new / plan.target)
        else:
            to = new / (plan.target if file.name == plan.target else f"{plan.target}/{file.name}")
            _copy(path, to, ours=path.parent == work)
    # an archive whose only folder of use has the name already, beside files that nobody reads
    inner = new / plan.target / plan.target
    return inner if inner.is_dir() else new / plan.target


def _copy(path: Path, to: Path, ours: bool) -> None:
    """Copy a file; one of ours gets a second name instead, which takes no room, where that can be."""
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
    """Raise if the files cannot be read as the dataset, or are unverified and not as many as published."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CofimaWarning)  # said once, of the final place
        source = sources.find(name, DataOptions(root=ready.parent))
    wrong = count_problem(source, sources.info(name))
    if wrong and any(text.startswith("unverified") for text in known.values()):
        raise CofimaError(f"{name} as it was fetched has {wrong}; nothing was kept of it")


def _clear(work: Path) -> None:
    """Remove what was downloaded; the lock's own files stay with the lock."""
    for path in work.iterdir():
        if not path.name.startswith(".lock"):
            remove_aside(path)
