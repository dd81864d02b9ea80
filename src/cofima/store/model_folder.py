"""The model folder: reading and writing of its generations.

A generation is the checkpoint of a model after one change (a task, an extension, a rename, a merge): a folder
``0001``, ``0002``, ..., and a backbone file named by its own sha256, which generations with the same backbone
share. ``CURRENT`` names the current generation. Four rules make a kill or a power cut at any moment harmless:

- A generation is written to a temporary name, flushed and renamed, and is never changed afterwards.
- ``CURRENT`` is replaced last, by one rename. Before it the old generation is current, after it the new
  one; a mixture of both can never be read.
- A backbone is written before the first generation that uses it, and removed after the last one.
- The previous generation is kept (two in all), for :func:`undo`, and as a fallback if the new one is damaged.

Two more rules hold for concurrent processes:

- A number is never reused, not even after :func:`undo`. A reader finds the generation it has opened, or
  finds it gone, but never another one under its name.
- A writer holds the lock, and checks that the generation its change started from is still the current one.

Every file is verified by the sha256 in config.json, and config.json by its own. Importing this module needs
no torch, so that histories and reports can be read without it.
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
INFLIGHT = "inflight"  # mid-task checkpoint of a run


def current(folder: Path) -> Path | None:
    """Return the path of the current generation, or None if nothing has been saved yet."""
    name = _pointer(folder)
    while name is not None and not (NUMBER.fullmatch(name) and is_generation(folder / name)):
        before, name = name, _pointer(folder)
        # Read CURRENT again: another process may have replaced it, and removed the generation it named.
        if name == before:
            raise damaged(folder, None, f"{folder / CURRENT} names '{name[:80]}', which is not there")
    return None if name is None else folder / name


def read(folder: Path, path: Path | None = None) -> Generation:
    """Return the current generation of a folder, or the one at ``path``; tensors are not read."""
    if path is not None:
        return read_generation(folder, path)
    return read_with(folder, lambda generation: generation)


def read_with(folder: Path, use: Callable[[Generation], T]) -> T:
    """Call ``use`` with the current generation, and return its result.

    Readers take no lock. If another process writes newer generations and removes this one in the meantime,
    ``use`` is called again with the new current generation.
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
                raise  # not removed by another process, so the error is real


def ancestor(folder: Path, tasks: int) -> Path | None:
    """Return the newest ancestor of the current generation with this many tasks, or None if not kept."""
    found = (path for path in _lineage(folder) if len(read(folder, path).record.tasks) == tasks)
    return next(found, None)


def parent_of(generation: Generation) -> Path:
    """Return the path of a generation's parent; raise if it is not kept."""
    found = _parent(generation.path.parent, generation.path)
    if found is None:
        raise CofimaError(f"{generation.path.parent}: the state before {generation.name} is not kept")
    return found


def generation_id(folder: Path) -> str:
    """Return :attr:`Generation.id` of the current generation, or an empty string if there is none."""
    return "" if current(folder) is None else read(folder).id


def read_history(folder: Path) -> list[HistoryRow]:
    """Return the history of a model folder."""
    return read_with(folder, Generation.history)


def finished(folder: Path) -> bool:
    """Return True if all planned tasks have been learned."""
    if current(folder) is None:
        return False
    record = read(folder).record
    return len(record.tasks) >= record.planned_tasks


@contextmanager
def write(
    folder: Path, record: Record, history: Sequence[HistoryRow], *, replaces: bool = False
) -> Iterator[Path]:
    """Yield a folder for the tensors of a new generation, and make it the current one at the end.

    The model folder is locked in the meantime. A backbone that it already has is not stored twice. If
    anything fails, the previous generation stays current, and the new one is removed.

    Args:
        folder: The model folder.
        record: Content of config.json; ``parent``, ``versions`` and ``files`` are filled in.
        history: All changes so far.
        replaces: Replace the current generation: :func:`undo` returns to the one before it.
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
        with suppress(OSError):  # the change is committed; the next writer removes what is left
            remove_aside(folder / INFLIGHT)  # its checkpoint started from the previous generation
            clear_aside(folder)
            _prune(folder, None if record.config.get("keep_checkpoints") else 2)


def undo(folder: Path) -> tuple[Path, Generation]:
    """Revert to the parent of the current generation; return the path of the reverted one, and the parent."""
    require_model(folder)
    with folder_lock(folder):
        left = current(folder)
        if left is None:
            raise _not_a_model(folder)
        before = _parent(folder, left)
        if before is None:
            raise CofimaError(f"{folder}: there is nothing to undo; no state before {left.name} is kept")
        now = read(folder, before)
        now.verify()  # before CURRENT is replaced: never revert to a damaged generation
        write_text(folder / CURRENT, now.name + "\n")
        return left, now


def require_model(folder: Path) -> None:
    """Raise if a folder is not a model folder.

    Called before locking, which creates a missing folder and writes a file into it.
    """
    if current(folder) is None:
        raise _not_a_model(folder)


def check_writable(folder: Path) -> None:
    """Raise if a folder cannot be written, or holds user files that are named like generations."""
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
    """Raise if a folder cannot be written, holds another model than ``mine``, or has changed since.

    The result is only reliable while the caller holds the folder's lock.
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
    """Return True if a folder is empty, except for hidden files and what a killed process left behind."""
    return not (folder / CURRENT).exists() and all(
        path.name.startswith(".")
        or SHARED.fullmatch(path.name)
        or (NUMBER.fullmatch(path.name) and not is_foreign(path))
        for path in folder.iterdir()
    )


def _share_backbone(folder: Path, written: Path) -> str:
    """Move a backbone to its shared file, unless that exists already; return its sha256."""
    digest = file_digest(written)
    shared = folder / shared_name(digest)
    if _has_content(shared, digest):
        written.unlink()
    else:
        with write_aside(shared) as aside:
            written.replace(aside)
    return digest


def _has_content(path: Path, digest: str) -> bool:
    """Return True for a file with this sha256; False if it is damaged or a symbolic link."""
    try:
        with open_file(path) as file:
            return not path.is_symlink() and hashlib.file_digest(file, "sha256").hexdigest() == digest
    except OSError:
        return False


def _completed(path: Path, record: Record, backbone: str) -> Record:
    """Return the record with versions and the sha256 of all other files filled in."""
    versions = {name: installed_version(name) for name in ("cofima", "torch", "timm", "numpy")}
    versions["python"] = platform.python_version()
    files = {BACKBONE: backbone} | {file.name: file_digest(file) for file in sorted(path.iterdir())}
    return record.model_copy(update={"format": FORMAT, "versions": versions, "files": files})


def _withdraw(folder: Path, path: Path) -> None:
    """Remove a generation that never became current.

    It did if only the flush after the last rename failed; then CURRENT names it, and it stays.
    """
    with suppress(CofimaError, OSError):
        if _pointer(folder) != path.name and _is_intact(folder, path):
            remove_aside(path)
        _remove_unused_backbones(folder)


def _next_name(folder: Path, tasks: int) -> str:
    """Return an unused name above all that were ever used; a first generation is named by its task count.

    Only writers remove generations, and never the newest, so the highest number ever used still exists.
    """
    numbers = [int(path.name) for path in numbered(folder) if not is_foreign(path)]
    number = max(numbers, default=tasks - 1) + 1
    while os.path.lexists(folder / f"{number:04d}"):  # a user's file or folder
        number += 1
    if not NUMBER.fullmatch(f"{number:04d}"):
        raise CofimaError(f"{folder}: there is no number for a generation after {max(numbers)}")
    return f"{number:04d}"


def _parent(folder: Path, path: Path) -> Path | None:
    """Return the parent of a generation, or None if it has none or the parent is not kept."""
    before = [other for other in generations(folder) if is_before(other, path)]
    try:
        name = read_generation(folder, path).record.parent
    except CofimaError:  # damaged: the previous one is a good guess, and all there is to go back to
        return before[-1] if before else None
    return next((other for other in before if other.name == name), None)


def _lineage(folder: Path) -> Iterator[Path]:
    """Yield the current generation and its ancestors, as far as they are kept."""
    path = current(folder)
    while path is not None:
        yield path
        path = _parent(folder, path)


def _prune(folder: Path, number: int | None) -> None:
    """Remove all generations except the last ``number`` of the lineage, or its whole length if None.

    Generations outside the lineage were undone. Damaged and foreign ones are never removed.
    """
    kept = list(islice(_lineage(folder), number))
    for path in generations(folder):
        if path not in kept and _is_intact(folder, path):
            remove_aside(path)
    _remove_unused_backbones(folder)


def _remove_unused_backbones(folder: Path) -> None:
    """Remove backbones that no generation uses.

    Nothing is removed if a generation cannot be read, as it may use any of them.
    """
    used = backbones(folder).values()
    if None in used:
        return
    for name in names(folder):
        found = SHARED.fullmatch(name)
        if found and found[1] not in used and not (folder / name).is_dir():
            (folder / name).unlink()


def _is_intact(folder: Path, path: Path) -> bool:
    """Return True if a folder is a readable generation and holds nothing else."""
    try:
        read_generation(folder, path)
    except CofimaError:
        return False
    return not is_foreign(path)


def _pointer(folder: Path) -> str | None:
    """Return the content of CURRENT, or None if there is no such file."""
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
