"""The task that a run was cut off in: whose it is, whether it may go on, and how to say where."""

import signal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from cofima import generations, ranks
from cofima.files import file_digest
from cofima.interruption import Interrupted
from cofima.store import Model
from cofima.training import sealed
from cofima.training.inflight import NOT_KEPT, Inflight
from cofima.training.keeper import Keeper, wanted


def keeping(model: Model, folder: Path) -> Inflight:
    """Return what keeps the training of a task in the middle, for this run in this folder."""
    every = wanted()
    if every is None or ranks.world() > 1:  # several processes go on after finished tasks only
        return NOT_KEPT
    device = model.method.context.device.type
    made = {"cofima": version("cofima"), "torch": version("torch"), "device": device}
    said = {
        "config": model.config.model_dump(mode="json"),
        "data": model.data,
        "with": made | {"threads": torch.get_num_threads()},
    }
    return Keeper(folder / generations.INFLIGHT, said, lambda: _generation(folder), every)


def begun(folder: Path) -> dict[str, Any]:
    """Return what is said of the task in progress: nothing, unless it goes on from the state in force."""
    if wanted() is None or ranks.world() > 1:
        return {}
    try:
        said = sealed.read_said(folder / generations.INFLIGHT) or {}
    except ValueError:
        return {}
    return said if said.get("after") == _generation(folder) else {}


def place(said: dict[str, Any]) -> str:
    """Say where the task in progress is."""
    within = "after its training" if said["complete"] else f"epoch {said['epoch'] + 1}, step {said['step']}"
    return f"task {said['task'] + 1}, {within}"


def interrupted(error: KeyboardInterrupt, folder: Path) -> Interrupted:
    """Say where the same command will go on."""
    said, done = begun(folder), generations.current(folder)
    if said:
        kept = f"the same command continues at {place(said)}"
    elif done is not None:
        kept = f"finished tasks are kept, the same command continues after task {int(done.name)}"
    else:
        kept = "no task was finished, the same command continues from the beginning"
    return Interrupted(getattr(error, "signal", signal.SIGINT), kept)


def _generation(folder: Path) -> str:
    """Return which state a task goes out from."""
    generation = generations.current(folder)
    if generation is None:
        return ""
    return f"{generation.name} {file_digest(generation / generations.CONFIG)}"
