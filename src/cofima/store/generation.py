"""One generation of a model folder: its files, each verified when it is read, and those beside it.

The backbone is not among them: it is a file in the model folder, named by its sha256, so that generations
whose backbone is the same share it. Importing this module needs no torch.
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
NUMBER = re.compile("[0-9]{4}|[1-9][0-9]{4,17}")  # the name of a generation
SHARED = re.compile(r"backbone-([0-9a-f]{64})\.safetensors")
CHANGED = "its content is not what was written (sha256 differs)"


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

    @property
    def size(self) -> int:
        """Bytes of all files, the backbone that it may share with others included."""
        return sum(self.place(name).stat().st_size for name in (CONFIG, *self.record.files))

    def place(self, name: str) -> Path:
        """Return the path of a file; the backbone is beside the generations that share it."""
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
        """Return backbone and predicting head under timm's names; read from disk where they are used."""
        return self._tensors(BACKBONE) | self._tensors(HEAD)

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
                raise self._damaged(f"{path}: not a safetensors file ({error})", name) from error

    @contextmanager
    def _verified(self, name: str) -> Iterator[Path]:
        """Yield the path of a verified file; raise in the end if the path has become another file's."""
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
    """Return the name of the file of a backbone, from its sha256."""
    return f"backbone-{digest}.safetensors"


def read_generation(folder: Path, path: Path) -> Generation:
    """Return a generation of a model folder; its tensors are not read."""
    return Generation(path, *_read_record(folder, path))


def backbones(folder: Path) -> dict[Path, str | None]:
    """Return the sha256 of the backbone of each generation; None where that cannot be told."""
    found: dict[Path, str | None] = {}
    for path in generations(folder):
        try:
            found[path] = read_generation(folder, path).record.files.get(BACKBONE)
        except CofimaError:
            found[path] = None
    return found


def numbered(folder: Path) -> list[Path]:
    """Return everything that has the name of a generation, by number."""
    return [folder / name for name in sorted(filter(NUMBER.fullmatch, names(folder)), key=int)]


def generations(folder: Path) -> list[Path]:
    """Return all generations, by number."""
    return [path for path in numbered(folder) if is_generation(path) and CONFIG in names(path)]


def is_generation(path: Path) -> bool:
    """Return True for a folder of the name of a generation, and not a link to one elsewhere."""
    try:
        return bool(NUMBER.fullmatch(path.name)) and stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def is_foreign(path: Path) -> bool:
    """Return True if something of the name of a generation is not one, nor the remains of one."""
    return not is_generation(path) or not names(path) <= FILES


def is_before(other: Path, path: Path) -> bool:
    """Return True if a generation has a lower number than another."""
    return int(other.name) < int(path.name)


def names(folder: Path) -> set[str]:
    """Return the names in a folder; none where it cannot be read, which whoever needs it will say."""
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
    """Return the error about a generation, or about CURRENT, and what is left to go back to.

    Generations that share a damaged ``backbone``, by its sha256, are no better.
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
