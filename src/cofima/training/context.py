"""Data types of the training loop: context, callbacks, batches."""

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
    """Settings and services for training a method."""

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
    """Callbacks for the training of one task; none by default."""

    checkpoint: Checkpoint = NO_CHECKPOINT
    """Writes and restores mid-task checkpoints."""
    on_epoch: OnEpoch | None = None
    """Called after each epoch with the task, the epoch, the loss of every step, and the learning rates."""
    stop: Callable[[], bool] | None = None
    """Called after each epoch; training ends if it returns true (early stopping)."""


NO_HOOKS = Hooks()


@dataclass(frozen=True)
class Batch:
    """Images of one training step, or this process's shard of them."""

    images: Tensor
    """Network input: augmented, normalized, on the device [B, 3, size, size]."""
    labels: Tensor
    """Class ids, on the device [B]."""
    pixels: Tensor
    """Raw pixels: uint8 on the CPU [B, 3, height, width]."""
    shard: distributed.Shard
    """Rows of the global batch that this shard holds; all of them in a single process."""


Loss = Callable[[Batch], Tensor]
