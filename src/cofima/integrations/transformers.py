"""Continual averaging for the ``transformers`` Trainer: one ``train()`` is one task."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from cofima.core import distributed
from cofima.core.atomic import write_aside
from cofima.core.errors import CofimaError
from cofima.core.extras import import_extra
from cofima.integrations.loop import ContinualAverage

TrainerCallback: Any = import_extra("transformers", "transformers").TrainerCallback

STATE = "merger.pt"
BEGUN = "begun.pt"  # state at the start of the last task, needed to resume from its checkpoints


class CoFiMACallback(TrainerCallback):  # type: ignore[misc]
    """Callback that averages the weights before and after ``train()``.

    After ``train()`` the model holds the average, which ``save_model()`` writes. Checkpoints hold the weights
    in training, so that they can be resumed; with ``load_best_model_at_end`` the best of them is averaged.

    Args:
        state: Folder for the state that the next task needs. Without it, the same callback object must be
            used for all tasks, and training cannot be resumed by another process.
        options: Options of :class:`~cofima.integrations.loop.ContinualAverage`.
    """

    def __init__(self, *, state: str | Path | None = None, **options: Any) -> None:
        self.folder = None if state is None else Path(state)
        self.options = options
        self.kept: dict[str, Any] = {}
        self.merger: ContinualAverage | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Store the weights before the task; if training is resumed, load those stored at its start."""
        self.merger = ContinualAverage(model, **self.options)
        resumed = state.global_step > 0
        if kept := self._read(BEGUN if resumed else STATE):
            self.merger.load_state_dict(kept)
        elif resumed:
            where = "state= was not given" if self.folder is None else f"{self.folder / BEGUN} is not there"
            raise CofimaError(
                f"the weights before this task are not known ({where}): the training cannot resume"
            )
        if not resumed:
            self.merger.begin()
            self._write(BEGUN)

    def on_train_end(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        """Average the weights, using the training images of the task."""
        assert self.merger is not None
        self.merger.end(train_dataloader)
        self._write(STATE)

    def _read(self, name: str) -> Any:
        if self.folder is None:
            return self.kept.get(name)
        path = self.folder / name
        return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None

    def _write(self, name: str) -> None:
        assert self.merger is not None
        if self.folder is None:
            self.kept[name] = self.merger.state_dict()
        elif distributed.rank() == 0:
            with write_aside(self.folder / name) as aside:
                torch.save(self.merger.state_dict(), aside)
