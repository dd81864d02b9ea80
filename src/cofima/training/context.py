"""Types of the training loop: its context, its callbacks, and its batches."""

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
    """Number of tasks planned."""
    progress: Progress = SILENT


OnEpoch = Callable[[int, int, Tensor, list[float]], None]


@dataclass(frozen=True)
class Hooks:
    """Callbacks of the training of one task; by default there are none."""

    checkpoint: Checkpoint = NO_CHECKPOINT
    """Writes and resumes the state in the middle of the task."""
    on_epoch: OnEpoch | None = None
    """Called after each epoch with the task, the epoch, the loss of every step, and the learning rates."""
    stop: Callable[[], bool] | None = None
    """Called after each epoch; true ends the training."""


NO_HOOKS = Hooks()


@dataclass(frozen=True)
class Batch:
    """Images of one step: this process's shard of them."""

    images: Tensor
    """Network input: augmented, normalized, on the device [B, 3, size, size]."""
    labels: Tensor
    """On the device [B]."""
    pixels: Tensor
    """Stored pixels: uint8 on the CPU [B, 3, height, width]."""
    shard: distributed.Shard
    """Rows of the whole batch that these are; all of them in a single process."""


Loss = Callable[[Batch], Tensor]
