"""Mid-task checkpoints: a killed run resumes at the last step that was written.

The training loop calls the hooks of :class:`Checkpoint`, which do nothing by default. A run passes a
:class:`RunCheckpoint`, which writes at intervals and resumes from a file of an earlier process. A run that
was killed at any step, even with kill -9 during a write, ends bit-identical to an uninterrupted one. To that
end:

- Everything that a step changes is written: weights and buffers, the optimizer, its schedule, parameters
  that it updates outside of the network, the random number generators, and the method's own state
  (:meth:`Learner.task_state`).
- Anything determined by the configuration and the seed is not written: the order of the images is drawn
  again.
- Tensors and description share one file, which is written under a temporary name, flushed, and renamed:
  there is always either the previous checkpoint or the new one, never a mixture.
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
EVERY = 60.0  # minimum seconds between two checkpoints; COFIMA_INFLIGHT overrides it
MAX_SHARE = 0.02  # maximum share of the time spent on writing
ASSUMED_SPEED = 100e6  # bytes per second: disk speed assumed until the first checkpoint has been timed


class Learner(Protocol):
    """Interface that a method offers to checkpoints."""

    def task_state(self) -> dict[str, Tensor]:
        """Return the method's own state that training steps change, apart from the network."""

    def restore_task_state(self, state: dict[str, Tensor]) -> None:
        """Restore the result of :meth:`task_state`."""

    def seconds_so_far(self) -> dict[str, float]:
        """Return the seconds spent on each phase of the task so far."""

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Add seconds to phases, such as those that an earlier process spent on the task."""

    def note(self, text: str) -> None:
        """Show a message to the user, and record it in the history."""


class Checkpoint:
    """Checkpoint hooks of the training loop; no-op by default."""

    epochs_before = 0
    """Epochs trained by an earlier process, if it completed the task's training."""

    def start_task(self, index: int, parent: str) -> None:
        """Start a task from the generation ``parent``; the next call of :meth:`begin` belongs to it."""

    def begin(self, net: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> int:
        """Start or resume training; return the first epoch to run."""
        return 0

    def begin_epoch(self, epoch: int, augment: torch.Generator, losses: Tensor) -> int:
        """Start or resume an epoch; return the number of its steps that are already done."""
        return 0

    def offer(self, step: int) -> None:
        """Offer a point at which a checkpoint is safe: ``step`` steps of the epoch are done."""

    def end(self) -> None:
        """Mark the training as complete."""


NO_CHECKPOINT = Checkpoint()


class RunCheckpoint(Checkpoint):
    """Checkpoint of a run, in a folder; covers the first training of each task.

    If a method trains twice in a task, a resumed run repeats the second training: the file holds the
    result of the first.

    Args:
        folder: Folder of the checkpoint.
        learner: The method.
        facts: Metadata stored in the description. ``environment`` lists the versions and settings that
            bit-identical results depend on.
        every: Minimum seconds between two checkpoints.
    """

    def __init__(self, folder: Path, learner: Learner, facts: dict[str, Any], every: float = EVERY) -> None:
        self.folder, self.learner, self.facts = folder, learner, facts
        self.budget = Budget(every)
        self.task: dict[str, Any] = {}
        self.training: Training | None = None
        self.fresh = self.failed = False

    def start_task(self, index: int, parent: str) -> None:
        """Start a task; only its first training is checkpointed."""
        self.task = {"task": index, "parent": parent}
        self.fresh, self.failed, self.epochs_before = True, False, 0

    def begin(self, net: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> int:
        """Start training, or resume it from the checkpoint."""
        self.training = Training(net, optimizer, schedule) if self.fresh else None
        self.fresh = False
        if self.training is None:
            return 0
        self.learner.add_seconds({"inflight": 0.0})
        weights = sum(value.numel() * value.element_size() for value in net.state_dict().values())
        self.budget.start(2 * weights)  # the optimizer's momentum is as large as the weights
        self._resume(self.training)
        # From here on, signals are deferred to offer(): in the middle of a step the state is inconsistent.
        signals.defer(True)
        if not self.training.complete:
            return self.training.epoch
        self.epochs_before = self.training.epoch
        return sys.maxsize  # beyond the last epoch: the loop has no epoch left to run

    def begin_epoch(self, epoch: int, augment: torch.Generator, losses: Tensor) -> int:
        """Start an epoch, or resume the interrupted one."""
        return self.training.begin_epoch(epoch, augment, losses) if self.training is not None else 0

    def offer(self, step: int) -> None:
        """Write if a checkpoint is due, or if a signal asks the run to stop."""
        if self.training is None:
            return
        self.training.step = step
        if self._wanted():
            self._write(self.training)
            self._leave()

    def end(self) -> None:
        """Write the trained weights if a checkpoint is due: Fisher and alignment may also take long."""
        if self.training is None:
            return
        if not self.training.complete and self._wanted():
            # epoch + 1 is the number of completed epochs, which a resumed process reports
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
        """Write the checkpoint; if that fails, tell the user once and continue training."""
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
        """Load the checkpoint if it is intact and belongs to this task; otherwise remove it."""
        try:
            description = read_description(self.folder)
            if description is None:
                return
            if description.get("format") != FORMAT:
                raise ValueError("another version of cofima wrote it")
            if any(description.get(key) != value for key, value in self.task.items()):
                # A leftover, silently removed: the task was completed since, or the one before it undone.
                remove(self.folder)
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
        except Exception as error:
            # The hashes match, so the file is not damaged but belongs to other settings. Some of it may be
            # restored already: starting the task over now would train on a mixture.
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
    """Time budget of checkpoints.

    The cost of writing grows with the network. A checkpoint is due only if at least ``every`` seconds have
    passed since the last one, and if all writing, including the next, stays within ``MAX_SHARE`` of the
    time since the start.
    """

    def __init__(self, every: float) -> None:
        self.every = every
        self.began = self.last = self.next = time.monotonic()
        self.cost, self.rate = 0.0, 1 / ASSUMED_SPEED

    def start(self, size: int) -> None:
        """Start a training whose checkpoint takes about ``size`` bytes."""
        self.last = time.monotonic()
        self._plan(size)

    def due(self) -> bool:
        """Return True if a checkpoint is due."""
        return time.monotonic() >= self.next

    def spend(self, seconds: float, size: int) -> None:
        """Record a checkpoint of ``size`` bytes; the next one is assumed to take as long."""
        self.last = time.monotonic()
        self.cost, self.rate = self.cost + seconds, seconds / size
        self._plan(size)

    def _plan(self, size: int) -> None:
        self.next = max(self.last + self.every, self.began + (self.cost + size * self.rate) / MAX_SHARE)


SCHEDULE = ("last_epoch", "_step_count", "_last_lr")  # all other fields follow from the options


@dataclass
class Training:
    """Training state between two steps: everything that a step changes."""

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
        """Start an epoch, or restore the interrupted one; return the number of its steps done."""
        self.augment, self.losses = augment, losses
        if self.resumed is None:
            self.epoch, self.step = epoch, 0
        else:
            augment.set_state(self.resumed["augment"])
            losses.copy_(self.resumed["losses"])
            self.resumed = None
        return self.step

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state; a completed training no longer needs its optimizer."""
        found = {f"net.{key}": value for key, value in self.net.state_dict().items()}
        # Dropout and stochastic depth draw from the global generators, augmentation from its own.
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
        """Return the remaining state as JSON-serializable values."""
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
        """Return why the tensors do not match this network, or an empty string if they do."""
        there = {key: value for key, value in tensors.items() if key.startswith("net.")}
        mine = {f"net.{key}": value for key, value in self.net.state_dict().items()}
        if odd := sorted(there.keys() ^ mine.keys()):
            return f"{len(odd)} tensors are missing or too many, the first is {odd[0]}"
        odd = [key for key, value in mine.items() if there[key].shape != value.shape]
        return f"{odd[0]} has another shape" if odd else ""

    def load(self, tensors: dict[str, Tensor], description: dict[str, Any]) -> None:
        """Restore the results of :meth:`tensors` and :meth:`plain`; check :meth:`misfit` first."""
        self.epoch, self.step, self.complete = (
            description["epoch"],
            description["step"],
            description["complete"],
        )
        net = {k.removeprefix("net."): v for k, v in tensors.items() if k.startswith("net.")}
        self.net.load_state_dict(net)  # copies in place: optimizer and method hold references to the tensors
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
        # A scheduler warns if it steps before its optimizer; here the optimizer stepped in another process.
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
        """Return the optimizer's parameters outside of the network, such as LoRA factors, by index."""
        inside = {id(weight) for weight in self.net.parameters()}
        return {index: weight for index, weight in enumerate(self._moved()) if id(weight) not in inside}

    def _device(self) -> torch.device:
        return next((weight.device for weight in self.net.parameters()), torch.device("cpu"))


def _like(value: Tensor, weight: Tensor) -> Tensor:
    """Return a copy with the memory format of its weight.

    Files store tensors contiguously, but a momentum buffer has the memory format of its weight, which may be
    channels-last. Arithmetic on mixed formats takes another code path and may round differently, so that a
    resumed run would no longer be bit-identical.
    """
    if value.shape != weight.shape or not value.ndim:
        return value.clone()
    return torch.empty_like(weight, dtype=value.dtype).copy_(value)


def interval() -> float | None:
    """Return the minimum seconds between two checkpoints from the environment; None disables them."""
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
        return {}  # the run reports the damage when it tries to resume
    return description if known else {}


def describe(description: dict[str, Any]) -> str:
    """Return the position within the task as text."""
    within = (
        "after its training"
        if description["complete"]
        else f"epoch {description['epoch'] + 1}, step {description['step']}"
    )
    return f"task {description['task'] + 1}, {within}"


def write(folder: Path, tensors: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write a checkpoint, one tensor at a time to save memory; an error leaves the previous file intact."""
    text = json.dumps(description | {"tensors": fingerprint(tensors)})
    header = {"description": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    kinds = {key: spec_of(value) for key, value in tensors.items()}
    if folder.is_symlink():
        raise CofimaError(f"{folder} is a symbolic link, and nothing is written through links")
    clear_aside(folder)  # a process killed during a write leaves a temporary file as large as a checkpoint
    with write_aside(folder / FILE) as aside, create_mapped(aside, kinds, header) as file:
        for key, value in tensors.items():
            file.put(key, 0, value.detach().cpu().contiguous().reshape(-1))


def read_description(folder: Path) -> dict[str, Any] | None:
    """Return the description of a checkpoint, None if there is none; raise ValueError if it is damaged."""
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
    """Return the tensors of a checkpoint; raise ValueError if they do not match its description."""
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
