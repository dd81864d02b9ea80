"""Context of the training of a task: settings, callbacks, and the batches of the loop."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cofima.core import distributed
from cofima.core.progress import SILENT, Progress
from cofima.core.seeds import Seeds
from cofima.data.transforms import View
from cofima.training.checkpoint import NO_CHECKPOINT, Checkpoint
from cofima.training.options import TrainOptions


@dataclass(frozen=True)
class Context:
    """Settings and services that a method learns with."""

    view: View
    train: TrainOptions
    seeds: Seeds
    device: torch.device
    tasks: int = 1
    """How many tasks are planned."""
    progress: Progress = SILENT


OnEpoch = Callable[[int, int, Tensor, list[float]], None]


@dataclass(frozen=True)
class Hooks:
    """Callbacks of the training of one task; by default there are none."""

    checkpoint: Checkpoint = NO_CHECKPOINT
    """Keeps how far the training is."""
    on_epoch: OnEpoch | None = None
    """Told after each epoch: the task, the epoch, the loss of every step, and the learning rates."""
    stop: Callable[[], bool] | None = None
    """Asked after each epoch; true ends the training."""


NO_HOOKS = Hooks()


@dataclass(frozen=True)
class Batch:
    """The images of one step, as far as this process trains on them."""

    images: Tensor
    """As the network sees them: augmented, normalized, on the device [B, 3, size, size]."""
    labels: Tensor
    """On the device [B]."""
    pixels: Tensor
    """As they are stored: uint8 on the CPU [B, 3, height, width]."""
    shard: distributed.Shard
    """Which rows of the whole batch these are; all of them in a single process."""


Loss = Callable[[Batch], Tensor]
