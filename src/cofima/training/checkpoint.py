"""Checkpoints in the middle of a task: a run that was killed resumes at the last step written.

The batch loop calls the hooks of :class:`Checkpoint`, which do nothing. A run passes a
:class:`RunCheckpoint`, which writes now and then, and resumes what an earlier process wrote. A run that was
killed at any step, even with kill -9 during a write, ends with the same bits as one that was not. For that

- everything that a step changes is written: weights and buffers, the optimizer, its schedule and what it
  moves outside of the network, the random generators, and what the method itself changes
  (:meth:`Learner.task_state`);
- what follows from the configuration and the seed alone is not: the order of the images is drawn again;
- tensors and description are one file, which is written aside, flushed, and renamed: there is always either
  the previous checkpoint or this one, never a mixture.
"""

import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cofima.core import signals
from cofima.core.atomic import clear_aside, remove_aside, write_aside
from cofima.core.errors import CofimaError
from cofima.models.info import fingerprint
from cofima.weights.mmap import create_mapped, spec_of

FORMAT = 2
FILE = "checkpoint.safetensors"
EVERY = 60.0  # seconds between two checkpoints, at least; COFIMA_INFLIGHT overrides it
MAX_SHARE = 0.02  # of the time that may go into writing
ASSUMED_SPEED = 100e6  # bytes a second: the disk, before the first checkpoint was timed


class Learner(Protocol):
    """Interface of a method to checkpoints."""

    def task_state(self) -> dict[str, Tensor]:
        """Return the changes of the steps so far in the method itself, beside the network."""

    def restore_task_state(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`task_state` returned."""

    def seconds_so_far(self) -> dict[str, float]:
        """Return the seconds of each phase of the task so far."""

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Add seconds to phases, such as those that an earlier process spent on the task."""

    def note(self, text: str) -> None:
        """Tell the user something, and keep it in the history."""


class Checkpoint:
    """Checkpoint hooks of the training loop; no-op by default."""

    epochs_before = 0
    """Epochs of the task's training, where an earlier process completed it."""

    def start_task(self, index: int, parent: str) -> None:
        """Begin a task from the generation that ``parent`` identifies; the next training belongs to it."""

    def begin(self, net: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> int:
        """Begin a training, or resume it; return its first epoch."""
        return 0

    def begin_epoch(self, epoch: int, augment: torch.Generator, losses: Tensor) -> int:
        """Begin an epoch; return how many of its steps are done already."""
        return 0

    def offer(self, step: int) -> None:
        """Allow a checkpoint here: so many steps of the epoch are done."""

    def end(self) -> None:
        """End the training: it is complete."""


NO_CHECKPOINT = Checkpoint()


class RunCheckpoint(Checkpoint):
    """Checkpoint of the first training of each task of a run, in a folder.

    If a method trains twice in a task, a resumed run repeats the second training: the file holds the
    result of the first.

    Args:
        folder: Folder of the checkpoint.
        learner: The method.
        facts: Stored in the description. ``environment`` is what the last bits of a result depend on.
        every: Seconds between two checkpoints, at least.
    """

    def __init__(self, folder: Path, learner: Learner, facts: dict[str, Any], every: float = EVERY) -> None:
        self.folder, self.learner, self.facts = folder, learner, facts
        self.budget = Budget(every)
        self.task: dict[str, Any] = {}
        self.training: Training | None = None
        self.fresh = self.failed = False

    def start_task(self, index: int, parent: str) -> None:
        """Begin a task: its first training is the one that is written."""
        self.task = {"task": index, "parent": parent}
        self.fresh, self.failed, self.epochs_before = True, False, 0

    def begin(self, net: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> int:
        """Begin a training, or resume it from the checkpoint."""
        self.training = Training(net, optimizer, schedule) if self.fresh else None
        self.fresh = False
        if self.training is None:
            return 0
        self.learner.add_seconds({"inflight": 0.0})
        weights = sum(value.numel() * value.element_size() for value in net.state_dict().values())
        self.budget.start(2 * weights)  # and as much for the optimizer
        self._resume(self.training)
        # From here on a signal waits for offer(): in the middle of a step there is no state to write.
        signals.defer(True)
        if not self.training.complete:
            return self.training.epoch
        self.epochs_before = self.training.epoch
        return sys.maxsize

    def begin_epoch(self, epoch: int, augment: torch.Generator, losses: Tensor) -> int:
        """Begin an epoch, or resume the one that was interrupted."""
        return self.training.begin_epoch(epoch, augment, losses) if self.training is not None else 0

    def offer(self, step: int) -> None:
        """Write if it is time, or if a signal asks the run to stop."""
        if self.training is None:
            return
        self.training.step = step
        if self._wanted():
            self._write(self.training)
            self._leave()

    def end(self) -> None:
        """Write the trained weights if it is time: what follows (Fisher, alignment) may take long as well."""
        if self.training is None:
            return
        if not self.training.complete and self._wanted():
            self.training.epoch, self.training.step, self.training.complete = self.training.epoch + 1, 0, True
            self._write(self.training)
        self._leave()
        self.training = None
        signals.defer(False)

    def _wanted(self) -> bool:
        return self.budget.due() or signals.pending() is not None

    def _leave(self) -> None:
        if (asked := signals.pending()) is not None:
            raise signals.Interrupted(asked)

    def _write(self, training: "Training") -> None:
        """Write the checkpoint; if that fails, tell the user once and go on."""
        start = time.monotonic()
        own = {f"method.{key}": value for key, value in self.learner.task_state().items()}
        tensors = training.tensors() | own
        description = {"format": FORMAT, "seconds": self.learner.seconds_so_far()}
        try:
            write(self.folder, tensors, self.facts | self.task | training.plain() | description)
        except CofimaError as error:
            if not self.failed:
                self.learner.note(
                    f"the state in the middle of this task could not be written ({error}); "
                    "the training goes on, and would be repeated after a crash"
                )
            self.failed = True
        seconds = time.monotonic() - start
        self.learner.add_seconds({"inflight": seconds})
        self.budget.spend(seconds, sum(value.numel() * value.element_size() for value in tensors.values()))

    def _resume(self, training: "Training") -> None:
        """Load the checkpoint of this task if it is intact and fits; otherwise remove it, and say why."""
        try:
            description = read_description(self.folder)
            if description is None:
                return
            if description.get("format") != FORMAT:
                raise ValueError("another version of cofima wrote it")
            if any(description.get(key) != value for key, value in self.task.items()):
                remove(self.folder)  # the task has been learned since, or the one before it undone
                return
            tensors = read_tensors(self.folder, description)
            if misfit := training.misfit(tensors):
                raise ValueError(misfit)
        except ValueError as error:
            self.learner.note(f"the state in the middle of this task was not taken up: {error}")
            remove(self.folder)
            return
        try:
            self._note_environment(description["environment"])
            training.load(tensors, description)
            own = {k.removeprefix("method."): v for k, v in tensors.items() if k.startswith("method.")}
            self.learner.restore_task_state(own)
            self.learner.add_seconds(description["seconds"])
        except Exception as error:  # the hashes are right: what does not fit was written so
            raise CofimaError(
                f"{self.folder / FILE} does not fit this task ({type(error).__name__}: {error}): remove it, "
                "and the task is learned from its beginning"
            ) from error

    def _note_environment(self, before: dict[str, Any]) -> None:
        now = self.facts["environment"]
        other = [f"{key} {before.get(key)}, now {now[key]}" for key in now if before.get(key) != now[key]]
        if other:
            self.learner.note(f"this task was begun with {'; '.join(other)}: the last bits may differ")


class Budget:
    """Schedule of checkpoints.

    The cost of one grows with the network. So it is due only after ``every`` seconds, and once all
    writing, the next included, is at most ``MAX_SHARE`` of the time since the start.
    """

    def __init__(self, every: float) -> None:
        self.every = every
        self.began = self.last = self.next = time.monotonic()
        self.cost, self.rate = 0.0, 1 / ASSUMED_SPEED

    def start(self, size: int) -> None:
        """Begin a training whose checkpoint takes about ``size`` bytes."""
        self.last = time.monotonic()
        self._plan(size)

    def due(self) -> bool:
        """Return True if it is time to write."""
        return time.monotonic() >= self.next

    def spend(self, seconds: float, size: int) -> None:
        """Count a checkpoint of ``size`` bytes; the next is expected to take as long."""
        self.last = time.monotonic()
        self.cost, self.rate = self.cost + seconds, seconds / size
        self._plan(size)

    def _plan(self, size: int) -> None:
        self.next = max(self.last + self.every, self.began + (self.cost + size * self.rate) / MAX_SHARE)


SCHEDULE = ("last_epoch", "_step_count", "_last_lr")  # the rest follows from the options


@dataclass
class Training:
    """State of a training between two steps: everything that a step changes."""

    net: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    epoch: int = 0
    step: int = 0
    complete: bool = False
    augment: torch.Generator | None = None
    losses: Tensor | None = None
    resumed: dict[str, Tensor] | None = None
    """Tensors of the interrupted epoch, until :meth:`begin_epoch` restores them."""

    def begin_epoch(self, epoch: int, augment: torch.Generator, losses: Tensor) -> int:
        """Begin an epoch, or restore the interrupted one; return the number of its steps done."""
        self.augment, self.losses = augment, losses
        if self.resumed is None:
            self.epoch, self.step = epoch, 0
        else:
            augment.set_state(self.resumed["augment"])
            losses.copy_(self.resumed["losses"])
            self.resumed = None
        return self.step

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors; a complete training no longer needs its optimizer."""
        found = {f"net.{key}": value for key, value in self.net.state_dict().items()}
        # Dropout and stochastic depth draw from the global generators; augmentation from one of its own.
        found["chance"] = torch.get_rng_state()
        if (device := self._device()).type == "cuda":
            found["chance_cuda"] = torch.cuda.get_rng_state(device)
        if self.complete:
            return found
        assert self.augment is not None
        assert self.losses is not None
        found |= {"augment": self.augment.get_state(), "losses": self.losses}
        found |= {f"moved.{index}": value for index, value in self._outside().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            found |= {f"optimizer.{index}.{name}": value for name, value in tensors.items()}
        return found

    def plain(self) -> dict[str, Any]:
        """Return the rest, as JSON-able values."""
        schedule, optimizer = self.schedule.state_dict(), self.optimizer.state_dict()
        plain = [
            [index, name, value]
            for index, state in optimizer["state"].items()
            for name, value in state.items()
            if not isinstance(value, Tensor)
        ]
        return {
            "epoch": self.epoch,
            "step": self.step,
            "complete": self.complete,
            "schedule": {key: schedule[key] for key in SCHEDULE},
            "groups": optimizer["param_groups"],
            "optimizer": plain,
        }

    def misfit(self, tensors: dict[str, Tensor]) -> str:
        """Return the reason why tensors do not fit this network, or an empty string."""
        there = {key: value for key, value in tensors.items() if key.startswith("net.")}
        mine = {f"net.{key}": value for key, value in self.net.state_dict().items()}
        if odd := sorted(there.keys() ^ mine.keys()):
            return f"{len(odd)} tensors are missing or too many, the first is {odd[0]}"
        odd = [key for key, value in mine.items() if there[key].shape != value.shape]
        return f"{odd[0]} has another shape" if odd else ""

    def load(self, tensors: dict[str, Tensor], description: dict[str, Any]) -> None:
        """Restore what :meth:`tensors` and :meth:`plain` returned; check :meth:`misfit` first."""
        self.epoch, self.step, self.complete = (
            description["epoch"],
            description["step"],
            description["complete"],
        )
        net = {k.removeprefix("net."): v for k, v in tensors.items() if k.startswith("net.")}
        self.net.load_state_dict(net)  # in place: optimizer and method refer to the same tensors
        torch.set_rng_state(tensors["chance"])
        if "chance_cuda" in tensors and (device := self._device()).type == "cuda":
            torch.cuda.set_rng_state(tensors["chance_cuda"], device)
        if self.complete:
            return
        self.resumed = {key: tensors[key] for key in ("augment", "losses")}
        with torch.no_grad():
            for index, weight in self._outside().items():
                weight.copy_(tensors[f"moved.{index}"])
        self.schedule.load_state_dict(description["schedule"])
        self.optimizer.load_state_dict(
            {"state": self._optimizer(tensors, description), "param_groups": description["groups"]}
        )
        # A schedule warns if it steps before its optimizer; here the optimizer stepped in another process.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _optimizer(
        self, tensors: dict[str, Tensor], description: dict[str, Any]
    ) -> dict[int, dict[str, Any]]:
        state: dict[int, dict[str, Any]] = {}
        moved = self._moved()
        for key, value in tensors.items():
            if key.startswith("optimizer."):
                _, number, name = key.split(".", 2)
                state.setdefault(int(number), {})[name] = _like(value, moved[int(number)])
        for number, name, value in description["optimizer"]:
            state.setdefault(number, {})[name] = value
        return state

    def _moved(self) -> list[Tensor]:
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def _outside(self) -> dict[int, Tensor]:
        """Return what the optimizer moves outside of the network, such as factors of its weights."""
        inside = {id(weight) for weight in self.net.parameters()}
        return {index: weight for index, weight in enumerate(self._moved()) if id(weight) not in inside}

    def _device(self) -> torch.device:
        return next((weight.device for weight in self.net.parameters()), torch.device("cpu"))


def _like(value: Tensor, weight: Tensor) -> Tensor:
    """Return a copy with the memory layout of its weight.

    A file holds tensors row by row, but a momentum buffer has the layout of its weight, which may be
    channels-last; arithmetic over two layouts takes another path and may round differently.
    """
    if value.shape != weight.shape or not value.ndim:
        return value.clone()
    return torch.empty_like(weight, dtype=value.dtype).copy_(value)


def interval() -> float | None:
    """Return the seconds between two checkpoints, from the environment; None turns them off."""
    text = os.environ.get("COFIMA_INFLIGHT", "")
    try:
        return None if text == "off" else float(text or EVERY)
    except ValueError:
        raise CofimaError(f"COFIMA_INFLIGHT = {text}: expected seconds, or off") from None


def pending(folder: Path, parent: str) -> dict[str, Any]:
    """Return the description of the task in progress; {} unless it started from generation ``parent``."""
    try:
        description = read_description(folder) or {}
        known = description.get("parent") == parent and describe(description)
    except (ValueError, LookupError, TypeError):
        return {}  # the run reports it when it tries to resume
    return description if known else {}


def describe(description: dict[str, Any]) -> str:
    """Return the position in the task, in words."""
    within = (
        "after its training"
        if description["complete"]
        else f"epoch {description['epoch'] + 1}, step {description['step']}"
    )
    return f"task {description['task'] + 1}, {within}"


def write(folder: Path, tensors: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write tensors one by one, without a copy of them all; after an error the previous file is intact."""
    text = json.dumps(description | {"tensors": fingerprint(tensors)})
    header = {"description": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    kinds = {key: spec_of(value) for key, value in tensors.items()}
    if folder.is_symlink():
        raise CofimaError(f"{folder} is a symbolic link, and nothing is written through links")
    clear_aside(folder)  # what a process killed during a write left, as large as a checkpoint
    with write_aside(folder / FILE) as aside, create_mapped(aside, kinds, header) as file:
        for key, value in tensors.items():
            file.put(key, 0, value.detach().cpu().contiguous().reshape(-1))


def read_description(folder: Path) -> dict[str, Any] | None:
    """Return the description of the checkpoint, None if there is none; raise ValueError if it is damaged."""
    if not (folder / FILE).is_file():
        return None
    try:
        with safe_open(folder / FILE, "pt") as file:
            header: dict[str, str] = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"it cannot be read: {error}") from error
    text = header.get("description", "")
    if header.get("sha256") != hashlib.sha256(text.encode()).hexdigest():
        raise ValueError("its description is not what was written (sha256 differs)")
    try:
        description = json.loads(text)
    except RecursionError as error:
        raise ValueError("its description is nested too deeply") from error
    if not isinstance(description, dict):
        raise ValueError("its description is not a mapping")
    return description


def read_tensors(folder: Path, description: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that a description belongs to; raise ValueError if they are damaged."""
    try:
        tensors = load_file(folder / FILE)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"its tensors cannot be read: {error}") from error
    if fingerprint(tensors) != description.get("tensors"):
        raise ValueError("its tensors are not what was written (sha256 differs)")
    return tensors


def remove(folder: Path) -> None:
    """Remove a checkpoint."""
    remove_aside(folder)
