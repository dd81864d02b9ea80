"""The model folder: one reader and one writer of its generations.

A generation is the state of a model after one change (a task, an extension, a rename, a merge), a folder
``0001``, ``0002``, ..., and a backbone, which is a file named by its own sha256: generations that have the
same one share it. ``CURRENT`` names the current generation. Four rules make a kill or a power cut at any
moment harmless:

- A generation is written aside, flushed and renamed, and is never changed afterwards.
- ``CURRENT`` is replaced last, in one rename. Until then the old generation is current, from then on the
  new one; a mixture of both cannot be read.
- A backbone is there before a generation that names it, and is removed after the last one that does.
- The generation before stays (two in all): it is what :func:`undo` returns to, and what is left should the
  new one prove damaged.

And two rules for several processes: a number is never used again, also not after :func:`undo`, so what a
reader has opened is what it says or is gone, never something else; and who writes a change holds the lock,
and the generation that the change was made from is still the current one.

Every file is read against the sha256 in config.json, and config.json against its own. Importing this module
needs no torch: histories and reports are read without it.
"""

import hashlib
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from cofima.core.atomic import clear_aside, file_digest, open_file, remove_aside, write_aside, write_text
from cofima.core.errors import CofimaError
from cofima.core.extras import installed_version
from cofima.core.lock import folder_lock
from cofima.store.generation import (
    CURRENT,
    NUMBER,
    SHARED,
    Generation,
    backbones,
    damaged,
    generations,
    is_before,
    is_foreign,
    is_generation,
    names,
    numbered,
    read_generation,
    shared_name,
)
from cofima.store.history import HistoryRow, dump_rows
from cofima.store.record import BACKBONE, CONFIG, FORMAT, HISTORY, Record

T = TypeVar("T")
INFLIGHT = "inflight"  # checkpoint in the middle of the task being learned


def current(folder: Path) -> Path | None:
    """Return the path of the current generation, or None where nothing has been learned yet."""
    name = _pointer(folder)
    while name is not None and not (NUMBER.fullmatch(name) and is_generation(folder / name)):
        before, name = name, _pointer(folder)
        if name == before:  # and not one that another process has just replaced, and then removed
            raise damaged(folder, None, f"{folder / CURRENT} names '{name[:80]}', which is not there")
    return None if name is None else folder / name


def read(folder: Path, path: Path | None = None) -> Generation:
    """Return the current generation, or another one of the folder; tensors are not read."""
    if path is not None:
        return read_generation(folder, path)
    return read_with(folder, lambda generation: generation)


def read_with(folder: Path, use: Callable[[Generation], T]) -> T:
    """Return what a function reads from the current generation.

    A generation may be removed while it is read, if another process has written newer ones; then the
    function is called again with the one that is current by then.
    """
    while True:
        path = current(folder)
        if path is None:
            raise _not_a_model(folder)
        try:
            generation = read_generation(folder, path)
            return use(generation)
        except (CofimaError, OSError):
            if path.is_dir() or current(folder) == path:
                raise


def ancestor(folder: Path, tasks: int) -> Path | None:
    """Return the newest state with so many tasks on the way to the current one, or None if it is not kept."""
    found = (path for path in _lineage(folder) if len(read(folder, path).record.tasks) == tasks)
    return next(found, None)


def parent_of(generation: Generation) -> Path:
    """Return the path of the generation that another was made from; raise if it is not kept."""
    found = _parent(generation.path.parent, generation.path)
    if found is None:
        raise CofimaError(f"{generation.path.parent}: the state before {generation.name} is not kept")
    return found


def generation_id(folder: Path) -> str:
    """Return :attr:`Generation.id` of the current generation; empty without any."""
    return "" if current(folder) is None else read(folder).id


def read_history(folder: Path) -> list[HistoryRow]:
    """Return the history of a model folder."""
    return read_with(folder, Generation.history)


def finished(folder: Path) -> bool:
    """Return True if a folder has learned all tasks planned."""
    if current(folder) is None:
        return False
    record = read(folder).record
    return len(record.tasks) >= record.planned_tasks


@contextmanager
def write(
    folder: Path, record: Record, history: Sequence[HistoryRow], *, replaces: bool = False
) -> Iterator[Path]:
    """Yield a folder for the tensors of a new generation; in the end, make it the current one.

    The model folder is locked meanwhile. A backbone that it has already is not kept twice. Whatever fails,
    the previous generation stays current, and nothing is left of the new one.

    Args:
        folder: The model folder.
        record: How the generation was made.
        history: All changes so far.
        replaces: Take the place of the current generation: :func:`undo` returns to the one before it.
    """
    with folder_lock(folder):
        before = current(folder)
        if before is not None and replaces:
            before = _parent(folder, before)
        name, parent = _next_name(folder, len(record.tasks)), before and before.name
        try:
            with write_aside(folder / name) as aside:
                aside.mkdir()
                yield aside
                backbone = _share_backbone(folder, aside / BACKBONE)
                (aside / HISTORY).write_text(dump_rows(history), "utf-8")
                made = record.model_copy(update={"parent": parent})
                (aside / CONFIG).write_text(_completed(aside, made, backbone).text(), "utf-8")
            write_text(folder / CURRENT, name + "\n")
        except BaseException:
            _withdraw(folder, folder / name)
            raise
        with suppress(OSError):  # the change is in force; what stays is removed by the next writer
            remove_aside(folder / INFLIGHT)  # a checkpoint that started from the previous generation
            clear_aside(folder)
            _prune(folder, None if record.config.get("keep_checkpoints") else 2)


def undo(folder: Path) -> tuple[Path, Generation]:
    """Go back to the parent of the current generation; return the path of the one left, and the parent."""
    require_model(folder)
    with folder_lock(folder):
        left = current(folder)
        if left is None:
            raise _not_a_model(folder)
        before = _parent(folder, left)
        if before is None:
            raise CofimaError(f"{folder}: there is nothing to undo; no state before {left.name} is kept")
        now = read(folder, before)
        now.verify()
        write_text(folder / CURRENT, now.name + "\n")
        return left, now


def require_model(folder: Path) -> None:
    """Raise if a folder is not a model folder; nothing is written into one that is not."""
    if current(folder) is None:
        raise _not_a_model(folder)


def check_writable(folder: Path) -> None:
    """Raise if a folder cannot be written, or has folders of the user's under names of generations."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise CofimaError(f"{folder} cannot be written: {there} is not a folder that may be written to")
    if there != folder:
        return
    if foreign := [path.name for path in numbered(folder) if is_foreign(path)]:
        raise CofimaError(
            f"{folder} holds {', '.join(foreign)}, and models are kept under such names: "
            "give another folder, or a new one inside it"
        )


def check_replaceable(folder: Path, mine: Generation | None) -> None:
    """Raise if a folder cannot be written, or holds another model than ``mine``, or a newer generation.

    The answer is worth something only while the caller holds the folder's lock.
    """
    check_writable(folder)
    if current(folder) is None:
        return
    if mine is None or mine.path.resolve().parent != folder.resolve():
        raise CofimaError(
            f"{folder} holds a model already: give another folder, or extend it (cofima extend)"
        )
    there = read(folder)
    if there.id != mine.id:
        raise CofimaError(f"{folder} has changed since it was loaded ({mine.name} then, {there.name} now)")


def is_empty(folder: Path) -> bool:
    """Return True if a folder holds nothing but, perhaps, remains of a generation of a killed process."""
    return not (folder / CURRENT).exists() and all(
        path.name.startswith(".")
        or SHARED.fullmatch(path.name)
        or (NUMBER.fullmatch(path.name) and not is_foreign(path))
        for path in folder.iterdir()
    )


def _share_backbone(folder: Path, written: Path) -> str:
    """Move a backbone to where generations share it, unless it is there already; return its sha256."""
    digest = file_digest(written)
    shared = folder / shared_name(digest)
    if _has_content(shared, digest):
        written.unlink()
    else:
        with write_aside(shared) as aside:
            written.replace(aside)
    return digest


def _has_content(path: Path, digest: str) -> bool:
    """Return True for a file with this sha256; neither for a damaged one nor for a link to one elsewhere."""
    try:
        with open_file(path) as file:
            return not path.is_symlink() and hashlib.file_digest(file, "sha256").hexdigest() == digest
    except OSError:
        return False


def _completed(path: Path, record: Record, backbone: str) -> Record:
    """Return the record completed with the sha256 of the other files, and versions."""
    versions = {name: installed_version(name) for name in ("cofima", "torch", "timm", "numpy")}
    versions["python"] = platform.python_version()
    files = {BACKBONE: backbone} | {file.name: file_digest(file) for file in sorted(path.iterdir())}
    return record.model_copy(update={"format": FORMAT, "versions": versions, "files": files})


def _withdraw(folder: Path, path: Path) -> None:
    """Remove a generation that was never in force; one is, if only the flush after the last rename failed."""
    with suppress(CofimaError, OSError):
        if _pointer(folder) != path.name and _is_intact(folder, path):
            remove_aside(path)
        _remove_unused_backbones(folder)


def _next_name(folder: Path, tasks: int) -> str:
    """Return a name above all that were ever used; that of a first generation is its number of tasks.

    Only the writer removes generations, and never the newest, so none was above those that are there.
    """
    numbers = [int(path.name) for path in numbered(folder) if not is_foreign(path)]
    number = max(numbers, default=tasks - 1) + 1
    while os.path.lexists(folder / f"{number:04d}"):  # a folder of the user's
        number += 1
    if not NUMBER.fullmatch(f"{number:04d}"):
        raise CofimaError(f"{folder}: there is no number for a generation after {max(numbers)}")
    return f"{number:04d}"


def _parent(folder: Path, path: Path) -> Path | None:
    """Return the generation that another was made from, or None if there is none, or it is not kept."""
    before = [other for other in generations(folder) if is_before(other, path)]
    try:
        name = read_generation(folder, path).record.parent
    except CofimaError:  # damaged: the one before it is a good guess, and all that is left to go back to
        return before[-1] if before else None
    return next((other for other in before if other.name == name), None)


def _lineage(folder: Path) -> Iterator[Path]:
    """Yield the current generation, its parent, and so on, as far as they are kept."""
    path = current(folder)
    while path is not None:
        yield path
        path = _parent(folder, path)


def _prune(folder: Path, number: int | None) -> None:
    """Remove all generations but so many of the lineage, by default all of it: others were undone.

    What is damaged, or was not written here, stays.
    """
    kept = list(islice(_lineage(folder), number))
    for path in generations(folder):
        if path not in kept and _is_intact(folder, path):
            remove_aside(path)
    _remove_unused_backbones(folder)


def _remove_unused_backbones(folder: Path) -> None:
    """Remove backbones that no generation names; none while there is a generation that cannot be read."""
    used = backbones(folder).values()
    if None in used:
        return
    for name in names(folder):
        found = SHARED.fullmatch(name)
        if found and found[1] not in used and not (folder / name).is_dir():
            (folder / name).unlink()


def _is_intact(folder: Path, path: Path) -> bool:
    """Return True if a folder is a generation and holds nothing else."""
    try:
        read_generation(folder, path)
    except CofimaError:
        return False
    return not is_foreign(path)


def _pointer(folder: Path) -> str | None:
    """Return the content of CURRENT, or None where there is none."""
    try:
        with open_file(folder / CURRENT) as file:
            return file.read(100).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CofimaError(f"{folder / CURRENT} cannot be read: {error.strerror}") from error


def _not_a_model(folder: Path) -> CofimaError:
    reason = f"it has no file {CURRENT}" if folder.is_dir() else "there is no such folder"
    return CofimaError(f"{folder} is not a model folder: {reason}")
