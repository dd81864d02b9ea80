"""Tensors and what is said of them, in a folder that holds all of it or what was there before.

Two files of tensors take turns; ``position.json`` names the one in force and is replaced last.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cofima.files import json_digest, sync, write_text
from cofima.models.identity import fingerprint
from cofima.weights.mapped import create_mapped, kind_of

SAID = "position.json"
TURNS = ("a.safetensors", "b.safetensors")


def write(folder: Path, tensors: dict[str, Tensor], said: dict[str, Any]) -> None:
    """Write tensors one by one, without a copy of them all; then put them into force.

    An OSError or CofimaError leaves what was there before as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = _said(folder).get("file") if (folder / SAID).is_file() else None
    name = TURNS[1] if before == TURNS[0] else TURNS[0]
    path = folder / name
    path.unlink(missing_ok=True)  # of a process that was killed while it wrote
    try:
        with create_mapped(path, {key: kind_of(value) for key, value in tensors.items()}, {}) as file:
            for key, value in tensors.items():
                file.put(key, 0, value.detach().cpu().contiguous().reshape(-1))
        sync(path)
        sync(folder)
        sealed = said | {"file": name, "tensors": fingerprint(tensors)}
        write_text(folder / SAID, json.dumps(sealed | {"sha256": json_digest(sealed)}))
    except BaseException:
        if _said(folder).get("file") != name:
            path.unlink(missing_ok=True)
        raise
    for other in TURNS:
        if other != name:
            (folder / other).unlink(missing_ok=True)


def read_said(folder: Path) -> dict[str, Any] | None:
    """Return what is said of the tensors, None where there are none; a ValueError says what is wrong."""
    if not folder.is_dir():
        return None
    said = _said(folder)
    if not said:
        raise ValueError(f"{SAID} is missing, or not what was written")
    return said


def read_tensors(folder: Path, said: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of which this was said; a ValueError says what is wrong with them."""
    try:
        tensors = load_file(folder / said["file"])
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"its tensors cannot be read: {error}") from error
    if fingerprint(tensors) != said.get("tensors"):
        raise ValueError("its tensors are not what was written (sha256 differs)")
    return tensors


def remove(folder: Path) -> None:
    """Take everything away, the description first: a removal that is cut short leaves nothing in force."""
    (folder / SAID).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _said(folder: Path) -> dict[str, Any]:
    """Return what is said, or nothing if it cannot be believed."""
    try:
        said: dict[str, Any] = json.loads((folder / SAID).read_text("utf-8"))
        return said if said.pop("sha256", None) == json_digest(said) else {}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
