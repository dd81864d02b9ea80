"""Continual averaging for the Trainer of Lightning: one ``fit`` is one task."""

from typing import Any

import torch

from cofima.core.errors import CofimaError
from cofima.core.extras import import_extra
from cofima.integrations.loop import ContinualAverage

Callback: Any = import_extra("lightning.pytorch", "lightning").Callback


class ContinualAveraging(Callback):  # type: ignore[misc]
    """Average the module with itself before ``fit``, when training ends.

    The state is in every Lightning checkpoint. One that was written during a task holds the trained weights,
    and resumes it; one that ``trainer.save_checkpoint`` wrote after ``fit`` holds the average, and what
    ``fit(ckpt_path=...)`` learns from there is the next task.

    Args:
        options: Those of :class:`~cofima.integrations.loop.ContinualAverage`; ``forward`` gets the module.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.kept: dict[str, Any] = {}
        self.merger: ContinualAverage | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the weights before the task, unless a checkpoint in the middle of one was loaded."""
        kept = self.state_dict()
        self.merger = ContinualAverage(pl_module, **self.options)
        if kept:
            self.merger.load_state_dict(kept)
        if self.merger.before is None:
            self.merger.begin()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Average, by the training images of the task."""
        assert self.merger is not None
        self.merger.end(trainer.train_dataloader)
        self.kept = self.merger.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return self.kept if self.merger is None else self.merger.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a checkpoint, for the training that follows."""
        self.merger, self.kept = None, state_dict

    def load_checkpoint(self, path: Any) -> None:
        """Take the state out of a checkpoint's file, for a task that starts with a new trainer."""
        states = torch.load(path, map_location="cpu", weights_only=True).get("callbacks", {})
        if self.state_key not in states:
            raise CofimaError(f"{path} has no state of {self.state_key}: was it trained with this callback?")
        self.load_state_dict(states[self.state_key])
