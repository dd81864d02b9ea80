"""The model folder: one reader and one writer of its generations.

A generation is the state of a model after one change (a task, an extension, a rename, a merge), a folder
``0001``, ``0002``, ... complete in itself. ``CURRENT`` names the current one. Three rules make a kill or a
power cut at any moment harmless:

- A generation is written aside, flushed and renamed, and is never changed afterwards.
- ``CURRENT`` is replaced last, in one rename. Until then the old generation is current, from then on the
  new one; a mixture of both cannot be read.
- The generation before stays (two in all): it is what :func:`undo` returns to, and what is left should the
  new one prove damaged.

Every file is read against the sha256 in config.json, and config.json against its own. Importing this module
needs no torch: histories and reports are read without it.
"""

import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cofima.core.atomic import clear_aside, file_digest, json_digest, write_aside, write_text
from cofima.core.errors import CofimaError, problems
from cofima.core.lock import folder_lock
from cofima.store.history import HistoryRow, dump_rows, parse_rows

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 3
CURRENT = "CURRENT"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
STATE = "state.safetensors"
HISTORY = "history.jsonl"
IMAGES = "images.safetensors"  # only where the user asked for images to be kept
FEATURES = "held_out.safetensors"  # features of held-out images
INFLIGHT = "inflight"  # checkpoint in the middle of the task being learned
NUMBER = "[0-9]" * 4  # the name of a generation, as a glob
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


class Record(BaseModel):
    """Content of config.json: how a generation was made, and the sha256 of its other files.

    Attributes:
        config: The resolved configuration.
        backbone: Identity of the backbone.
        preprocess: Preparation of images.
        data: Facts about the images.
        tasks: Names of the classes, task by task; together the order of the logits.
        serving: Facts for predicting, for example the calibration.
        plugins: Name, file and sha256 of each plugin that the model was made with.
        versions: Filled in by the writer, as are ``files`` and ``format``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    method: MethodFacts
    config: dict[str, Any]
    backbone: dict[str, Any]
    preprocess: dict[str, Any]
    data: dict[str, Any]
    tasks: list[list[str]]
    planned_tasks: int = Field(gt=0)
    serving: dict[str, Any] = {}
    plugins: list[dict[str, str]] = []
    versions: dict[str, str] = {}
    files: dict[str, str] = {}

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
    """A generation whose config.json has been verified; other files are verified as they are read."""

    path: Path
    record: Record

    @property
    def name(self) -> str:
        """Name of its folder, for example ``0003``."""
        return self.path.name

    def history(self) -> list[HistoryRow]:
        """Return the rows of history.jsonl, oldest first."""
        return parse_rows(self._verified(HISTORY).read_text("utf-8"), f"{self.path / HISTORY}")

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
            self._verified(name)

    def _tensors(self, name: str) -> dict[str, "Tensor"]:
        from safetensors.torch import load_file  # here, so that histories are read without torch

        return load_file(self._verified(name))

    def _verified(self, name: str) -> Path:
        path = self.path / name
        if not path.is_file():
            raise _damaged(self.path.parent, self.name, f"{path}: missing")
        if file_digest(path) != self.record.files.get(name):
            raise _damaged(self.path.parent, self.name, f"{path}: {CHANGED}")
        return path


def current(folder: Path) -> Path | None:
    """Return the path of the current generation, or None where nothing has been learned yet."""
    pointer = folder / CURRENT
    if not pointer.is_file():
        return None
    name = pointer.read_text("utf-8", errors="replace").strip()
    if not (name.isdigit() and (folder / name).is_dir()):
        raise _damaged(folder, name, f"{pointer} names '{name}', which is not there")
    return folder / name


def read(folder: Path, path: Path | None = None) -> Generation:
    """Return the current generation, or another one of the folder; tensors are not read."""
    path = path or current(folder)
    if path is None:
        raise _not_a_model(folder)
    return Generation(path, _read_record(folder, path))


def generation_id(folder: Path) -> str:
    """Return the name of the current generation and the sha256 of its record; empty without any."""
    path = current(folder)
    return "" if path is None else f"{path.name} {file_digest(path / CONFIG)}"


def read_history(folder: Path) -> list[HistoryRow]:
    """Return the history of a model folder."""
    return read(folder).history()


def finished(folder: Path) -> bool:
    """Return True if a folder has learned all tasks planned."""
    path = current(folder)
    if path is None:
        return False
    record = read(folder, path).record
    return len(record.tasks) >= record.planned_tasks


@contextmanager
def write(folder: Path, record: Record, history: Sequence[HistoryRow]) -> Iterator[Path]:
    """Yield a folder for the tensors of a new generation; in the end, make it the current one.

    The model folder is locked meanwhile. Whatever fails, the previous generation stays current, and
    nothing is left of the new one.
    """
    with folder_lock(folder):
        before = current(folder)
        name = f"{len(record.tasks) if before is None else int(before.name) + 1:04d}"
        with write_aside(folder / name) as aside:
            aside.mkdir()
            yield aside
            (aside / HISTORY).write_text(dump_rows(history), "utf-8")
            (aside / CONFIG).write_text(_completed(aside, record).text(), "utf-8")
            if _is_ours(folder / name):
                # left by a crash before CURRENT was replaced, or by undo: CURRENT does not name it
                shutil.rmtree(folder / name)
        write_text(folder / CURRENT, name + "\n")
        shutil.rmtree(
            folder / INFLIGHT, ignore_errors=True
        )  # a checkpoint that started from the previous generation
        clear_aside(folder)
        if not record.config.get("keep_checkpoints"):
            _prune(folder, name)


def undo(folder: Path) -> tuple[Path, Generation]:
    """Go back to the previous generation; return the path of the one left, and the current one."""
    left = current(folder)
    if left is None:
        raise _not_a_model(folder)
    with folder_lock(folder):
        left = current(folder) or left  # read again under the lock
        before = [path for path in _generations(folder) if path.name < left.name]
        if not before:
            raise CofimaError(f"{folder}: there is nothing to undo; no state before {left.name} is kept")
        now = read(folder, before[-1])
        now.verify()
        write_text(folder / CURRENT, now.name + "\n")
        return left, now


def check_writable(folder: Path) -> None:
    """Raise if a folder cannot be written, or has folders of the user's under names of generations."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise CofimaError(f"{folder} cannot be written: {there} is not a folder that may be written to")
    foreign = [path.name for path in folder.glob(NUMBER) if not _is_ours(path)] if there == folder else []
    if foreign:
        raise CofimaError(
            f"{folder} holds {', '.join(sorted(foreign))}, and models are kept under such names: "
            "give another folder, or a new one inside it"
        )


def check_replaceable(folder: Path, mine: Path | None) -> None:
    """Raise if a folder cannot be written, or holds another model than ``mine``, or a newer generation."""
    check_writable(folder)
    there = current(folder)
    if there is None:
        return
    if mine is None or mine.resolve().parent != folder.resolve():
        raise CofimaError(
            f"{folder} holds a model already: give another folder, or extend it (cofima extend)"
        )
    if there != mine:
        raise CofimaError(f"{folder} has changed since it was loaded ({mine.name} then, {there.name} now)")


def is_empty(folder: Path) -> bool:
    """Return True if a folder holds nothing but, perhaps, remains of a generation of a killed process."""
    return not (folder / CURRENT).exists() and all(
        path.name.startswith(".") or _is_ours(path) for path in folder.iterdir()
    )


def _completed(path: Path, record: Record) -> Record:
    """Return the record completed with the sha256 of the other files, and versions."""
    versions = {name: version(name) for name in ("cofima", "torch", "timm", "numpy")}
    versions["python"] = platform.python_version()
    files = {file.name: file_digest(file) for file in sorted(path.iterdir())}
    return record.model_copy(update={"format": FORMAT, "versions": versions, "files": files})


def _prune(folder: Path, newest: str) -> None:
    """Keep the newest generation and the one before."""
    before = [path.name for path in _generations(folder) if path.name < newest][-1:]
    for path in folder.glob(NUMBER):
        if path.name not in (newest, *before) and _is_ours(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    """Return True for a generation or its remains, False for a user's folder of such a name."""
    there = {file.name for file in path.iterdir()} if path.is_dir() else {"a file"}
    return not there or bool(there & {WEIGHTS, STATE, HISTORY, CONFIG, IMAGES, FEATURES})


def _generations(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(NUMBER) if (path / CONFIG).is_file())


def _read_record(folder: Path, path: Path) -> Record:
    file = path / CONFIG
    try:
        content: dict[str, Any] = json.loads(file.read_text("utf-8"))
        written, number = content.pop("sha256", None), int(content["format"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, path.name, f"{file}: unreadable ({error})") from error
    if number != FORMAT:
        age, advice = ("a newer", "update cofima") if number > FORMAT else ("an older", "make it again")
        raise CofimaError(f"{folder} was written by {age} cofima (format {number}, here {FORMAT}): {advice}")
    if written != json_digest(content):
        raise _damaged(folder, path.name, f"{file}: {CHANGED}")
    try:
        return Record.model_validate(content)
    except ValidationError as error:
        raise _damaged(folder, path.name, f"{file}: {error.errors()[0]['msg']}") from error


def _not_a_model(folder: Path) -> CofimaError:
    reason = f"it has no file {CURRENT}" if folder.is_dir() else "there is no such folder"
    return CofimaError(f"{folder} is not a model folder: {reason}")


def _damaged(folder: Path, name: str, fault: str) -> CofimaError:
    others = [path.name for path in _generations(folder) if path.name < name or not name.isdigit()]
    advice = (
        f"the state before, {others[-1]}, is kept: put its name into {folder / CURRENT} to go back"
        if others
        else "there is no state before it"
    )
    return problems(f"model folder {folder}", [fault, advice])
