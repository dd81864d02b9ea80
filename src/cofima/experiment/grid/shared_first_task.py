"""Sharing of first tasks: a first task that several cells have in common is learned once.

Cells share it if their methods agree in everything that affects the state after the first task
(:func:`cofima.methods.first_task_key`) and all other settings are equal. They start from a copy of its
folder.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cofima import methods
from cofima.core.atomic import json_digest, write_text
from cofima.core.errors import CofimaError
from cofima.core.lock import folder_lock
from cofima.experiment.grid.cells import identity
from cofima.experiment.metrics_log import METRICS
from cofima.store import model_folder
from cofima.store.config import Config
from cofima.store.model import method_facts
from cofima.store.record import BACKBONE, HEAD, STATE

FOLDER = ".first"  # hidden, so that reports do not read it
NOTE = "the first task was taken over from cells that share it"


def key(config: Config) -> str | None:
    """Return the name of a cell's first task, equal for equal first tasks; None if it cannot be shared."""
    first = methods.first_task_key(methods.build(config.method, config.options))
    if first is None:
        return None
    said = {k: v for k, v in identity(config).items() if k != "method" and not k.startswith("options.")}
    return json_digest([said, first])[:12]


def shared(cells: Mapping[Path, Config], out: Path) -> dict[Path, list[Path]]:
    """Return the folders of first tasks, each with the cells that start from it.

    Only cells that have not started count. A first task of a single cell is not shared, unless it has
    already been learned.
    """
    found: dict[Path, list[Path]] = {}
    for folder, config in cells.items():
        name = key(config) if model_folder.current(folder) is None else None
        if name is not None:
            found.setdefault(out / FOLDER / name, []).append(folder)
    return {first: group for first, group in found.items() if len(group) > 1 or learned(first)}


def learned(first: Path) -> bool:
    """Return True if a first task has been learned; a damaged one is removed."""
    try:
        return model_folder.current(first) is not None
    except CofimaError:
        shutil.rmtree(first, ignore_errors=True)
        return False


def take(first: Path, config: Config, folder: Path) -> bool:
    """Start a cell from a shared first task; return False if it has started already, or there is no task."""
    with folder_lock(folder):
        if model_folder.current(folder) is not None or not learned(first):
            return False
        _take(first, config, folder)
        return True


def _take(first: Path, config: Config, folder: Path) -> None:
    source = model_folder.read(first)
    source.verify()
    own = {
        "config": config.model_dump(mode="json"),
        "method": method_facts(methods.find(config.method)),
    }
    history = source.history()
    history[-1].notes.append(NOTE)
    with model_folder.write(folder, source.record.model_copy(update=own), history) as aside:
        for name in (BACKBONE, HEAD, STATE):
            _link(source.place(name), aside / name)
        if (first / METRICS).is_file():
            write_text(folder / METRICS, (first / METRICS).read_text("utf-8"))


def clear(groups: Mapping[Path, list[Path]]) -> None:
    """Remove the first tasks that all of their cells have started from."""
    for first, group in groups.items():
        if all(model_folder.current(folder) is not None for folder in group):
            shutil.rmtree(first, ignore_errors=True)
            with suppress(OSError):
                first.parent.rmdir()


def _link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it; links are safe as files of a generation never change."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
