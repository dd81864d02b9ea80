"""Where a merge goes: never over its inputs, nothing half-written, and only if there is room."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cofima.errors import CofimaError
from cofima.files import sync
from cofima.generations import CURRENT


def out_problems(out: Path, inputs: Iterable[Path], folder: bool, force: bool) -> list[str]:
    """Return what forbids to write to ``out``: a file, or a model folder."""
    real = out.resolve()
    for path in inputs:
        other = path.resolve()
        if real == other or real in other.parents or (other.is_dir() and other in real.parents):
            return [f"out = {out}: would overwrite {path}, which is read; give another place"]
    there = next(parent for parent in real.parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        return [f"out = {out}: {there} is not a folder that may be written to"]
    if not folder and out.suffix != ".safetensors":
        return [f"out = {out}: files are merged into a file; its name must end in .safetensors"]
    if not out.exists():
        return []
    if folder != out.is_dir() or (folder and any(out.iterdir()) and not (out / CURRENT).is_file()):
        return [
            f"out = {out}: is there, and is not a {'model folder' if folder else 'file'}; it is left alone"
        ]
    return [] if force else [f"out = {out}: exists; give another place, or --force to replace it"]


def check_room(out: Path, size: int) -> None:
    """Refuse to begin what the disk cannot hold."""
    there = next(parent for parent in out.resolve().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise CofimaError(f"{out} needs {size / 1e6:,.0f} MB, and {there} has {free / 1e6:,.0f} MB left")


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """Give a path beside ``out`` for a file or a folder; what is there in the end becomes ``out`` at once."""
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove(aside)
        yield aside
        for path in [*aside.rglob("*"), aside]:
            sync(path)
        _replace(aside, out)
        sync(out.parent)
    except OSError as error:
        raise CofimaError(
            f"{out} could not be written ({error.strerror or error}); nothing was changed"
        ) from error
    finally:
        _remove(aside)


def _replace(aside: Path, out: Path) -> None:
    if not aside.is_dir():
        aside.replace(out)
        return
    before = out.with_name(f".{out.name}.{os.getpid()}.before")
    if out.exists():
        out.rename(before)
    try:
        aside.rename(out)
    except OSError:
        if before.exists():
            before.rename(out)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
