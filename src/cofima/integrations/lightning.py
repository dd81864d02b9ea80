"""Continual averaging for Lightning's Trainer: one ``fit`` is one task."""

from typing import Any

import torch

from cofima.core.errors import CofimaError
from cofima.core.extras import import_extra
from cofima.integrations.loop import ContinualAverage

Callback: Any = import_extra("lightning.pytorch", "lightning").Callback


class ContinualAveraging(Callback):  # type: ignore[misc]
    """Callback that averages the weights before and after ``fit``.

    The state is part of every Lightning checkpoint. A checkpoint written during a task holds the weights in
    training, and resumes the task; one written by ``trainer.save_checkpoint`` after ``fit`` holds the
    average, and ``fit(ckpt_path=...)`` then learns the next task.

    Args:
        options: Options of :class:`~cofima.integrations.loop.ContinualAverage`; ``forward`` gets the module.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.kept: dict[str, Any] = {}
        self.merger: ContinualAverage | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Store the weights before the task, unless a mid-task checkpoint was loaded."""
        kept = self.state_dict()
        self.merger = ContinualAverage(pl_module, **self.options)
        if kept:
            self.merger.load_state_dict(kept)
        if self.merger.before is None:
            self.merger.begin()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Average the weights, using the training images of the task."""
        assert self.merger is not None
        self.merger.end(trainer.train_dataloader)
        self.kept = self.merger.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return self.kept if self.merger is None else self.merger.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint, for the training that follows."""
        self.merger, self.kept = None, state_dict

    def load_checkpoint(self, path: Any) -> None:
        """Load the state from a checkpoint file, for a task that starts with a new trainer."""
        states = torch.load(path, map_location="cpu", weights_only=True).get("callbacks", {})
        if self.state_key not in states:
            raise CofimaError(f"{path} has no state of {self.state_key}: was it trained with this callback?")
        self.load_state_dict(states[self.state_key])
