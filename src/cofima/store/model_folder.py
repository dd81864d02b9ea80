"""The model folder: one reader and one writer of its generations.

A generation is the state of a model after one change (a task, an extension, a rename, a merge), a folder
``0001``, ``0002``, ... complete in itself. ``CURRENT`` names the current one. Three rules make a kill or a
power cut at any moment harmless:

- A generation is written aside, flushed and renamed, and is never changed afterwards.
- ``CURRENT`` is replaced last, in one rename. Until then the old generation is current, from then on the
  new one; a mixture of both cannot be read.
- The generation before stays (two in all): it is what :func:`undo` returns to, and what is left should the
  new one prove damaged.

And two rules for several processes: a number is never used again, also not after :func:`undo`, so what a
reader has opened is what it says or is gone, never something else; and who writes a change holds the lock,
and the generation that the change was made from is still the current one.

Every file is read against the sha256 in config.json, and config.json against its own. Importing this module
needs no torch: histories and reports are read without it.
"""

import hashlib
import json
import os
import platform
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cofima.core.atomic import (
    clear_aside,
    file_digest,
    json_digest,
    open_file,
    remove_aside,
    write_aside,
    write_text,
)
from cofima.core.errors import CofimaError, problems
from cofima.core.extras import installed_version
from cofima.core.lock import folder_lock
from cofima.store.history import HistoryRow, describe_errors, dump_rows, parse_rows

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
MOST = 10**9  # of anything that is counted: what is more was not counted
Number = Annotated[int, Field(ge=0, le=MOST)]

FORMAT = 3
CURRENT = "CURRENT"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
STATE = "state.safetensors"
HISTORY = "history.jsonl"
IMAGES = "images.safetensors"  # only where the user asked for images to be kept
FEATURES = "held_out.safetensors"  # features of held-out images
INFLIGHT = "inflight"  # checkpoint in the middle of the task being learned
FILES = {WEIGHTS, STATE, HISTORY, CONFIG, IMAGES, FEATURES}
NUMBER = re.compile("[0-9]{4}|[1-9][0-9]{4,17}")  # the name of a generation
CHANGED = "its content is not what was written (sha256 differs)"


class MethodFacts(BaseModel):
    """Facts about the method that a reader needs without importing it.

    Attributes:
        label: Its name for people.
        all_at_once: All tasks are learned as one: there is no accuracy over time.
        keeps_images: Images of old classes are in its state.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str
    all_at_once: bool = False
    keeps_images: bool = False


class _Serving(BaseModel):
    """The facts for predicting that are relied on; a classifier may have more of them."""

    class Counts(BaseModel):
        """Held-out images of each class, and how many of them were answered right."""

        right: dict[str, Number]
        images: dict[str, Annotated[int, Field(ge=1, le=MOST)]]

        @model_validator(mode="after")
        def _fit(self) -> Self:
            if self.right.keys() != self.images.keys():
                raise ValueError("right answers and images are of other classes")
            return self

    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    distances: list[list[Annotated[float, Field(allow_inf_nan=False)]]] = []
    accuracy: Counts | None = None
    keep_images: Number = 0


class Record(BaseModel):
    """Content of config.json: how a generation was made, and the sha256 of its other files.

    Its author may be anybody: whoever reads it relies on nothing that is not checked here, or, for what
    torch is needed to know, by :func:`cofima.store.model.load_model`.

    Attributes:
        config: The resolved configuration.
        backbone: Identity of the backbone.
        preprocess: Preparation of images.
        data: Facts about the images.
        tasks: Names of the classes, task by task; together the order of the logits.
        serving: Facts for predicting, for example the calibration.
        plugins: Name, file and sha256 of each plugin that the model was made with.
        parent: Name of the generation that it was made from, to which :func:`undo` returns; None without one.
        versions: Filled in by the writer, as are ``parent``, ``files`` and ``format``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    method: MethodFacts
    config: dict[str, Any]
    backbone: dict[str, Any]
    preprocess: dict[str, Any]
    data: dict[str, Any]
    tasks: list[list[str]]
    planned_tasks: int = Field(gt=0, le=MOST)
    serving: dict[str, Any] = {}
    plugins: list[dict[str, str]] = []
    parent: str | None = None
    versions: dict[str, str] = {}
    files: dict[str, str] = {}

    @field_validator("tasks")
    @classmethod
    def _names_differ(cls, tasks: list[list[str]]) -> list[list[str]]:
        names = [name for task in tasks for name in task]
        if len(set(names)) < len(names) or not all(name.strip() for name in names):
            raise ValueError("names of classes are missing, or the same twice")
        return tasks

    @field_validator("serving")
    @classmethod
    def _can_serve(cls, serving: dict[str, Any]) -> dict[str, Any]:
        _Serving.model_validate(serving)
        return serving

    @property
    def classes(self) -> list[str]:
        """Names of all classes, in the order of the logits."""
        return [name for task in self.tasks for name in task]

    def text(self) -> str:
        """Return the text of config.json, which ends with the sha256 of all else in it."""
        content = self.model_dump()
        return json.dumps(content | {"sha256": json_digest(content)}, indent=2) + "\n"


@dataclass(frozen=True)
class Generation:
    """A generation whose config.json has been verified; other files are verified as they are read.

    Attributes:
        path: Its folder.
        record: The content of config.json.
        digest: The sha256 of config.json, and thus of everything in the generation.
    """

    path: Path
    record: Record
    digest: str

    @property
    def name(self) -> str:
        """Name of its folder, for example ``0003``."""
        return self.path.name

    @property
    def id(self) -> str:
        """Name and digest: no other generation has the same, even if the model folder is made anew."""
        return f"{self.name} {self.digest}"

    def history(self) -> list[HistoryRow]:
        """Return the rows of history.jsonl, oldest first."""
        with self._verified(HISTORY) as path:
            return parse_rows(path.read_text("utf-8"), f"{path}")

    def weights(self) -> dict[str, "Tensor"]:
        """Return backbone and predicting head under timm's names; read from disk where they are used."""
        return self._tensors(WEIGHTS)

    def state(self) -> dict[str, "Tensor"]:
        """Return the tensors that the method needs beside the weights for the next task."""
        return self._tensors(STATE)

    def images(self) -> dict[str, "Tensor"] | None:
        """Return the pixels and labels of kept images, or None where there are none."""
        return self._tensors(IMAGES) if IMAGES in self.record.files else None

    def features(self) -> dict[str, "Tensor"] | None:
        """Return the features of held-out images and what is known of each, or None where there are none."""
        return self._tensors(FEATURES) if FEATURES in self.record.files else None

    def verify(self) -> None:
        """Raise if any file is missing, or is not what was written."""
        for name in self.record.files:
            with self._verified(name):
                pass

    def _tensors(self, name: str) -> dict[str, "Tensor"]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file  # here, so that histories are read without torch

        with self._verified(name) as path:
            try:
                return load_file(path)
            except (SafetensorError, RuntimeError, ValueError, KeyError, AttributeError) as error:
                raise self._damaged(f"{path}: not a safetensors file ({error})") from error

    @contextmanager
    def _verified(self, name: str) -> Iterator[Path]:
        """Yield the path of a verified file; raise in the end if the path has become another file's."""
        path = self.path / name
        try:
            with open_file(path) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != self.record.files.get(name):
                    raise self._damaged(f"{path}: {CHANGED}")
                yield path
                if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    raise self._damaged(f"{path}: was replaced while it was read")
        except FileNotFoundError as error:
            raise self._damaged(f"{path}: missing") from error
        except (OSError, UnicodeDecodeError) as error:
            raise self._damaged(f"{path}: unreadable ({error})") from error

    def _damaged(self, fault: str) -> CofimaError:
        return _damaged(self.path.parent, self.path, fault)


def current(folder: Path) -> Path | None:
    """Return the path of the current generation, or None where nothing has been learned yet."""
    name = _pointer(folder)
    while name is not None and not (NUMBER.fullmatch(name) and _is_generation(folder / name)):
        before, name = name, _pointer(folder)
        if name == before:  # and not one that another process has just replaced, and then removed
            raise _damaged(folder, None, f"{folder / CURRENT} names '{name[:80]}', which is not there")
    return None if name is None else folder / name


def read(folder: Path, path: Path | None = None) -> Generation:
    """Return the current generation, or another one of the folder; tensors are not read."""
    if path is not None:
        return Generation(path, *_read_record(folder, path))
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
            generation = Generation(path, *_read_record(folder, path))
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

    The model folder is locked meanwhile. Whatever fails, the previous generation stays current, and
    nothing is left of the new one.

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
                (aside / HISTORY).write_text(dump_rows(history), "utf-8")
                made = record.model_copy(update={"parent": parent})
                (aside / CONFIG).write_text(_completed(aside, made).text(), "utf-8")
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
    if foreign := [path.name for path in _numbered(folder) if _is_foreign(path)]:
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
        path.name.startswith(".") or (NUMBER.fullmatch(path.name) and not _is_foreign(path))
        for path in folder.iterdir()
    )


def _completed(path: Path, record: Record) -> Record:
    """Return the record completed with the sha256 of the other files, and versions."""
    versions = {name: installed_version(name) for name in ("cofima", "torch", "timm", "numpy")}
    versions["python"] = platform.python_version()
    files = {file.name: file_digest(file) for file in sorted(path.iterdir())}
    return record.model_copy(update={"format": FORMAT, "versions": versions, "files": files})


def _withdraw(folder: Path, path: Path) -> None:
    """Remove a generation that was never in force; one is, if only the flush after the last rename failed."""
    with suppress(CofimaError, OSError):
        if _pointer(folder) != path.name and _is_intact(folder, path):
            remove_aside(path)


def _next_name(folder: Path, tasks: int) -> str:
    """Return a name above all that were ever used; that of a first generation is its number of tasks.

    Only the writer removes generations, and never the newest, so none was above those that are there.
    """
    numbers = [int(path.name) for path in _numbered(folder) if not _is_foreign(path)]
    number = max(numbers, default=tasks - 1) + 1
    while os.path.lexists(folder / f"{number:04d}"):  # a folder of the user's
        number += 1
    if not NUMBER.fullmatch(f"{number:04d}"):
        raise CofimaError(f"{folder}: there is no number for a generation after {max(numbers)}")
    return f"{number:04d}"


def _parent(folder: Path, path: Path) -> Path | None:
    """Return the generation that another was made from, or None if there is none, or it is not kept."""
    before = [other for other in _generations(folder) if _is_before(other, path)]
    try:
        name = _read_record(folder, path)[0].parent
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
    for path in _generations(folder):
        if path not in kept and _is_intact(folder, path):
            remove_aside(path)


def _is_intact(folder: Path, path: Path) -> bool:
    """Return True if a folder is a generation and holds nothing else."""
    try:
        _read_record(folder, path)
    except CofimaError:
        return False
    return not _is_foreign(path)


def _is_foreign(path: Path) -> bool:
    """Return True if something of the name of a generation is not one, nor the remains of one."""
    return not _is_generation(path) or not _names(path) <= FILES


def _is_generation(path: Path) -> bool:
    """Return True for a folder of the name of a generation, and not a link to one elsewhere."""
    try:
        return bool(NUMBER.fullmatch(path.name)) and stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _numbered(folder: Path) -> list[Path]:
    """Return everything that has the name of a generation, by number."""
    return [folder / name for name in sorted(filter(NUMBER.fullmatch, _names(folder)), key=int)]


def _generations(folder: Path) -> list[Path]:
    return [path for path in _numbered(folder) if _is_generation(path) and CONFIG in _names(path)]


def _names(folder: Path) -> set[str]:
    """Return the names in a folder; none where it cannot be read, which whoever needs it will say."""
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


def _pointer(folder: Path) -> str | None:
    """Return the content of CURRENT, or None where there is none."""
    try:
        with open_file(folder / CURRENT) as file:
            return file.read(100).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CofimaError(f"{folder / CURRENT} cannot be read: {error.strerror}") from error


def _read_record(folder: Path, path: Path) -> tuple[Record, str]:
    """Return the verified content of config.json, and the sha256 of the file."""
    file = path / CONFIG
    try:
        with open_file(file) as opened:
            text = opened.read()
        content: dict[str, Any] = json.loads(text, parse_constant=_no_number)
        written, number = content.pop("sha256", None), int(content["format"])
        digest = json_digest(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(folder, path, f"{file}: unreadable ({error})") from error
    if number != FORMAT:
        age, advice = ("a newer", "update cofima") if number > FORMAT else ("an older", "make it again")
        raise CofimaError(f"{folder} was written by {age} cofima (format {number}, here {FORMAT}): {advice}")
    if written != digest:
        raise _damaged(folder, path, f"{file}: {CHANGED}")
    try:
        return Record.model_validate(content), hashlib.sha256(text).hexdigest()
    except ValidationError as error:
        raise _damaged(folder, path, describe_errors(f"{file}", error)[0]) from error


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _not_a_model(folder: Path) -> CofimaError:
    reason = f"it has no file {CURRENT}" if folder.is_dir() else "there is no such folder"
    return CofimaError(f"{folder} is not a model folder: {reason}")


def _damaged(folder: Path, path: Path | None, fault: str) -> CofimaError:
    """Return the error about a generation, or about CURRENT, and what is left to go back to."""
    others = [other.name for other in _generations(folder) if path is None or _is_before(other, path)]
    advice = (
        f"the state before, {others[-1]}, is kept: put its name into {folder / CURRENT} to go back"
        if others
        else "there is no state before it"
    )
    return problems(f"model folder {folder}", [fault, advice])


def _is_before(other: Path, path: Path) -> bool:
    return int(other.name) < int(path.name)
