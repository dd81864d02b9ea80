"""The files of a model folder: which state is in force, and whether it is what was written.

One folder per generation (after each task), complete in itself; ``CURRENT`` names the one in force
and is replaced last, so that a crash never mixes two. Nothing here reads weights.
"""

import hashlib
import json
import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cofima.errors import CofimaError, problems
from cofima.files import write_text
from cofima.lock import alone

FORMAT = 1
WEIGHTS, STATE, HISTORY, CONFIG, CURRENT = (
    "model.safetensors",
    "state.safetensors",
    "history.jsonl",
    "config.json",
    "CURRENT",
)
INFLIGHT = "inflight"  # the task that is being learnt, as far as it is
IMAGES = "images.safetensors"  # only where the user asked for images to be kept
CHANGED = "its content is not what was written (sha256 differs)"


def current(folder: Path) -> Path | None:
    """Return the generation in force, or None where nothing has been learned yet."""
    pointer = folder / CURRENT
    if not pointer.is_file():
        return None
    name = pointer.read_text("utf-8", errors="replace").strip()
    if not (name.isdigit() and (folder / name).is_dir()):
        raise _damaged(folder, name, [f"{pointer} names '{name}', which is not there"])
    return folder / name


def finished(folder: Path) -> bool:
    """Tell whether a folder has learned all that was planned, without reading its weights."""
    generation = current(folder)
    if generation is None:
        return False
    kept = _read_config(folder, generation)
    return len(kept["tasks"]) >= int(kept["planned_tasks"])


def opened(folder: Path, generation: Path | None = None) -> tuple[Path, dict[str, Any]]:
    """Return a generation (else the one in force) and its config.json, checked file by file; load nothing."""
    generation = generation or current(folder)
    if generation is None:
        raise not_a_model(folder)
    kept = _read_config(folder, generation)
    for name in (WEIGHTS, STATE, HISTORY, *([IMAGES] if IMAGES in kept["files"] else [])):
        _verify(folder, generation, name, kept["files"])
    return generation, kept


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Return the history of a model folder, without reading its weights."""
    generation = current(folder)
    if generation is None:
        raise not_a_model(folder)
    _verify(folder, generation, HISTORY, _read_config(folder, generation)["files"])
    return [json.loads(line) for line in (generation / HISTORY).read_text("utf-8").splitlines()]


def classes_of(generation: Path) -> list[str]:
    """Return the names of the classes of a generation, without reading its weights."""
    return [name for task in _read_config(generation.parent, generation)["tasks"] for name in task]


def undo(folder: Path) -> tuple[Path, Path]:
    """Put the generation before into force again; return the one left, and the one in force now."""
    if current(folder) is None:
        raise not_a_model(folder)
    with alone(folder):
        return _undo(folder)


def _undo(folder: Path) -> tuple[Path, Path]:
    now = current(folder)
    assert now is not None
    before = [generation for generation in _generations(folder) if generation.name < now.name]
    if not before:
        raise CofimaError(f"{folder}: there is nothing to undo; no state before {now.name} is kept")
    kept = _read_config(folder, before[-1])
    for name in kept["files"]:
        _verify(folder, before[-1], name, kept["files"])
    write_text(folder / CURRENT, before[-1].name + "\n")
    return now, before[-1]


def seal(generation: Path, said: dict[str, Any]) -> None:
    """Write config.json: what is said of the model, format, versions, and the sha256 of the other files."""
    said = {"format": FORMAT, **said}
    said["versions"] = {name: version(name) for name in ("cofima", "torch", "timm", "numpy")}
    said["versions"]["python"] = platform.python_version()
    there = [name for name in (WEIGHTS, STATE, HISTORY, IMAGES) if (generation / name).is_file()]
    said["files"] = {name: _sha256(generation / name) for name in there}
    text = json.dumps(said | {"sha256": digest(said)}, indent=2)
    (generation / CONFIG).write_text(text + "\n", "utf-8")


def digest(said: dict[str, Any]) -> str:
    """Return the sha256 that config.json has of all else in it."""
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def refuse_place(folder: Path) -> None:
    """Refuse a folder that cannot be written, or where a generation would meet what is not ours."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise CofimaError(f"{folder} cannot be written: {there} is not a folder that may be written to")
    foreign = [d.name for d in folder.glob("[0-9]" * 4) if not ours(d)] if there == folder else []
    if foreign:
        raise CofimaError(
            f"{folder} holds {', '.join(sorted(foreign))}, and models are kept under such names: "
            "give another folder, or a new one inside it"
        )


def refuse_other(folder: Path, mine: Path | None) -> None:
    """Refuse a folder that cannot be written, or that holds another model or a newer state than mine."""
    refuse_place(folder)
    there = current(folder)
    if there is None:
        return
    if mine is None or mine.resolve().parent != folder.resolve():
        raise CofimaError(
            f"{folder} holds a model already: give another folder, or extend it (cofima extend)"
        )
    if there != mine:
        raise CofimaError(f"{folder} has changed since it was loaded ({mine.name} then, {there.name} now)")


def not_a_model(folder: Path) -> CofimaError:
    """Return what to say of a folder that holds no model."""
    reason = f"it has no file {CURRENT}" if folder.is_dir() else "there is no such folder"
    return CofimaError(f"{folder} is not a model folder: {reason}")


def prune(folder: Path, newest: str) -> None:
    """Keep the newest generation and the one before, and nothing that a crash left behind."""
    before = [g.name for g in _generations(folder) if g.name < newest][-1:]
    others = [g for g in folder.glob("[0-9]" * 4) if ours(g) and g.name not in (newest, *before)]
    aside = [path for path in folder.glob(".[0-9]*.*") if path.is_dir()]
    for path in (*others, *aside):
        shutil.rmtree(path, ignore_errors=True)


def ours(path: Path) -> bool:
    """Tell a generation, or what a killed process left of one, from a folder that has such a name."""
    there = {file.name for file in path.iterdir()} if path.is_dir() else {"a file"}
    return not there or bool(there & {WEIGHTS, STATE, HISTORY, CONFIG, IMAGES})


def _read_config(folder: Path, generation: Path) -> dict[str, Any]:
    try:
        kept: dict[str, Any] = json.loads((generation / CONFIG).read_text("utf-8"))
        written, newer = kept.pop("sha256", None), int(kept["format"]) > FORMAT
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, generation.name, [f"{generation / CONFIG}: unreadable ({error})"]) from error
    if newer:
        raise CofimaError(f"{folder} was written by a newer cofima (format {kept['format']}): update cofima")
    if written != digest(kept):
        raise _damaged(folder, generation.name, [f"{generation / CONFIG}: {CHANGED}"])
    return kept


def _verify(folder: Path, generation: Path, name: str, files: dict[str, str]) -> None:
    path = generation / name
    if not path.is_file():
        raise _damaged(folder, generation.name, [f"{path}: missing"])
    if _sha256(path) != files.get(name):
        raise _damaged(folder, generation.name, [f"{path}: {CHANGED}"])


def _damaged(folder: Path, name: str, found: list[str]) -> CofimaError:
    others = [g.name for g in _generations(folder) if g.name < name or not name.isdigit()]
    advice = (
        f"the state before, {others[-1]}, is kept: put its name into {folder / CURRENT} to go back"
        if others
        else "there is no state before it"
    )
    return problems(f"model folder {folder}", [*found, advice])


def _generations(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]" * 4) if (path / CONFIG).is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
