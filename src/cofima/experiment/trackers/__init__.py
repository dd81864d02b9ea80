"""Trackers by name: ``tensorboard``, ``wandb``, ``mlflow``, each with an optional location after a colon.

They forward metrics.jsonl to other tools, as local files unless a server is named.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cofima.core.errors import CofimaError, did_you_mean, problems
from cofima.experiment import metrics_log
from cofima.experiment.metrics_log import Listener
from cofima.experiment.trackers.base import Tracker
from cofima.experiment.trackers.mlflow import Mlflow
from cofima.experiment.trackers.tensorboard import TensorBoard
from cofima.experiment.trackers.wandb import Wandb
from cofima.store import model_folder
from cofima.store.config import Config
from cofima.store.history import is_run

# each tracker with the packages that it needs
TRACKERS: dict[str, tuple[type[Tracker], tuple[str, ...]]] = {
    "tensorboard": (TensorBoard, ("tensorboard",)),
    "wandb": (Wandb, ("wandb",)),
    "mlflow": (Mlflow, ("mlflow", "sqlalchemy", "alembic")),
}


def choose(wanted: Sequence[str], folder: Path, config: dict[str, Any]) -> list[Tracker]:
    """Return a tracker for each ``NAME[:WHERE]``; one error lists all problems, before any work."""
    wrong = [problem for text in wanted if (problem := _problem(text))]
    if wrong:
        raise problems("the choice of trackers", wrong)
    pairs = [text.partition(":")[::2] for text in dict.fromkeys(wanted)]
    return [TRACKERS[name][0](folder, config, where) for name, where in pairs]


def replay(trackers: Sequence[Tracker], folder: Path) -> int:
    """Send all lines of a run to trackers; return the number of lines."""
    history = model_folder.read_history(folder) if model_folder.current(folder) is not None else []
    if not is_run(history):
        raise CofimaError(f"{folder} is in use (cofima history {folder}): only runs are shown by trackers")
    lines = metrics_log.complete(folder, history)
    if not lines:
        raise CofimaError(f"{folder} holds no run: it has no {metrics_log.METRICS} and no finished task")
    try:
        for line in lines:
            for tracker in trackers:
                tracker(line)
    finally:
        for tracker in trackers:
            tracker.close()
    return len(lines)


def tracked(
    wanted: Sequence[str], config: Config, folder: Path, work: Callable[[Sequence[Listener]], Any]
) -> None:
    """Call ``work`` with trackers as listeners; a run that was already finished is replayed."""
    trackers = choose(wanted, folder, config.model_dump(mode="json"))
    try:
        work(trackers)
        if trackers and not any(tracker.sent for tracker in trackers):
            replay(trackers, folder)
    finally:
        for tracker in trackers:
            tracker.close()


def _problem(text: str) -> str | None:
    name, _, where = text.partition(":")
    if name not in TRACKERS:
        return f"{text}: unknown tracker{did_you_mean(name, TRACKERS)}"
    if name == "wandb" and where not in ("", "online", "offline"):
        return f"{text}: wandb is offline, or wandb:online"
    absent = [package for package in TRACKERS[name][1] if find_spec(package) is None]
    if absent:
        return f"{text}: {', '.join(absent)} not installed: pip install 'cofima[track]'"
    return None
