"""One generation of a model folder: a checkpoint whose files are verified as they are read.

The backbone is stored outside it, in the model folder, in a file named by its sha256: generations with the
same backbone share that file. Importing this module needs no torch.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from cofima.core.atomic import json_digest, open_file
from cofima.core.errors import CofimaError, problems
from cofima.store.history import HistoryRow, describe_errors, parse_rows
from cofima.store.record import BACKBONE, CONFIG, FEATURES, FORMAT, HEAD, HISTORY, IMAGES, STATE, Record

if TYPE_CHECKING:
    from torch import Tensor

CURRENT = "CURRENT"
FILES = {HEAD, STATE, HISTORY, CONFIG, IMAGES, FEATURES}
NUMBER = re.compile("[0-9]{4}|[1-9][0-9]{4,17}")  # folder name of a generation
SHARED = re.compile(r"backbone-([0-9a-f]{64})\.safetensors")
CHANGED = "its content is not what was written (sha256 differs)"


@dataclass(frozen=True)
class Generation:
    """A generation whose config.json has been verified; other files are verified as they are read.

    Attributes:
        path: Its folder.
        record: Content of config.json.
        digest: The sha256 of config.json; as config.json holds those of all other files, it identifies the
            whole generation.
    """

    path: Path
    record: Record
    digest: str

    @property
    def name(self) -> str:
        """Name of its folder, such as ``0003``."""
        return self.path.name

    @property
    def id(self) -> str:
        """Name and digest: unique, even if the model folder is deleted and created again."""
        return f"{self.name} {self.digest}"

    @property
    def size(self) -> int:
        """Size of all files in bytes, including a shared backbone."""
        return sum(self.place(name).stat().st_size for name in (CONFIG, *self.record.files))

    def place(self, name: str) -> Path:
        """Return the path of a file; the backbone is in the model folder, next to the generations."""
        return (
            self.path.parent / shared_name(self.record.files[BACKBONE])
            if name == BACKBONE
            else self.path / name
        )

    def history(self) -> list[HistoryRow]:
        """Return the rows of history.jsonl, oldest first."""
        with self._verified(HISTORY) as path:
            return parse_rows(path.read_text("utf-8"), f"{path}")

    def weights(self) -> dict[str, "Tensor"]:
        """Return the weights of backbone and head under timm's names, memory-mapped."""
        return self._tensors(BACKBONE) | self._tensors(HEAD)

    def state(self) -> dict[str, "Tensor"]:
        """Return the state tensors that the method needs for the next task, besides the weights."""
        return self._tensors(STATE)

    def images(self) -> dict[str, "Tensor"] | None:
        """Return pixels and labels of the stored images, or None if there are none."""
        return self._tensors(IMAGES) if IMAGES in self.record.files else None

    def features(self) -> dict[str, "Tensor"] | None:
        """Return the tensors of :class:`~cofima.store.held_out.HeldOut`, or None if there are none."""
        return self._tensors(FEATURES) if FEATURES in self.record.files else None

    def verify(self) -> None:
        """Raise if a file is missing, or its content differs from what was written."""
        for name in self.record.files:
            with self._verified(name):
                pass

    def _tensors(self, name: str) -> dict[str, "Tensor"]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file  # here, so that histories can be read without torch

        with self._verified(name) as path:
            try:
                return load_file(path)
            except (SafetensorError, RuntimeError, ValueError, KeyError, AttributeError) as error:
                raise self._damaged(f"{path}: not a safetensors file ({error})", name) from error

    @contextmanager
    def _verified(self, name: str) -> Iterator[Path]:
        """Yield the path of a verified file; raise at the end if the file was replaced in the meantime.

        The digest is computed from an open file, while readers such as safetensors open the path again.
        Comparing the two files afterwards shows that what was read is what was verified.
        """
        if name not in self.record.files:
            raise self._damaged(f"{self.path / CONFIG}: lists no {name}", name)
        path = self.place(name)
        try:
            with open_file(path) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != self.record.files[name]:
                    raise self._damaged(f"{path}: {CHANGED}", name)
                yield path
                if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    raise self._damaged(f"{path}: was replaced while it was read", name)
        except FileNotFoundError as error:
            raise self._damaged(f"{path}: missing", name) from error
        except (OSError, UnicodeDecodeError) as error:
            raise self._damaged(f"{path}: unreadable ({error})", name) from error

    def _damaged(self, fault: str, name: str) -> CofimaError:
        backbone = self.record.files.get(BACKBONE, "") if name == BACKBONE else ""
        return damaged(self.path.parent, self.path, fault, backbone)


def shared_name(digest: str) -> str:
    """Return the file name of a backbone, from its sha256."""
    return f"backbone-{digest}.safetensors"


def read_generation(folder: Path, path: Path) -> Generation:
    """Read config.json of a generation; tensors are not read."""
    return Generation(path, *_read_record(folder, path))


def backbones(folder: Path) -> dict[Path, str | None]:
    """Return the sha256 of each generation's backbone; None if config.json cannot be read."""
    found: dict[Path, str | None] = {}
    for path in generations(folder):
        try:
            found[path] = read_generation(folder, path).record.files.get(BACKBONE)
        except CofimaError:
            found[path] = None
    return found


def numbered(folder: Path) -> list[Path]:
    """Return all paths that are named like a generation, in numerical order."""
    return [folder / name for name in sorted(filter(NUMBER.fullmatch, names(folder)), key=int)]


def generations(folder: Path) -> list[Path]:
    """Return all generations, in numerical order."""
    return [path for path in numbered(folder) if is_generation(path) and CONFIG in names(path)]


def is_generation(path: Path) -> bool:
    """Return True for a folder that is named like a generation and is not a symbolic link."""
    try:
        return bool(NUMBER.fullmatch(path.name)) and stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def is_foreign(path: Path) -> bool:
    """Return True if a path that is named like a generation is neither one nor the remains of one."""
    return not is_generation(path) or not names(path) <= FILES


def is_before(other: Path, path: Path) -> bool:
    """Return True if ``other`` has a lower number than ``path``."""
    return int(other.name) < int(path.name)


def names(folder: Path) -> set[str]:
    """Return the names in a folder, or none if it cannot be read: opening its files will raise."""
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


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
        raise damaged(folder, path, f"{file}: unreadable ({error})") from error
    if number != FORMAT:
        age, advice = ("a newer", "update cofima") if number > FORMAT else ("an older", "make it again")
        raise CofimaError(f"{folder} was written by {age} cofima (format {number}, here {FORMAT}): {advice}")
    if written != digest:
        raise damaged(folder, path, f"{file}: {CHANGED}")
    try:
        return Record.model_validate(content), hashlib.sha256(text).hexdigest()
    except ValidationError as error:
        raise damaged(folder, path, describe_errors(f"{file}", error)[0]) from error


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def damaged(folder: Path, path: Path | None, fault: str, backbone: str = "") -> CofimaError:
    """Return an error about a generation, or about CURRENT if ``path`` is None, with the one to go back to.

    Generations that share the damaged ``backbone``, given by its sha256, are not proposed.
    """
    found = backbones(folder) if backbone else dict.fromkeys(generations(folder))
    before = [other for other in found if path is None or is_before(other, path)]
    others = [other.name for other in before if not backbone or found[other] not in (None, backbone)]
    advice = (
        f"the state before, {others[-1]}, is kept: put its name into {folder / CURRENT} to go back"
        if others
        else "there is no state before it"
    )
    return problems(f"model folder {folder}", [fault, advice])
