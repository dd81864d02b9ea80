"""Continual averaging for the Trainer of ``transformers``: one ``train()`` is one task."""

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
BEGUN = "begun.pt"  # the state with which the last task began, from which a checkpoint of it is resumed


class CoFiMACallback(TrainerCallback):  # type: ignore[misc]
    """Average the model with itself before ``train()``, when training ends.

    After ``train()`` the model holds the average, which ``save_model()`` writes. Checkpoints hold the trained
    weights, so that they resume; with ``load_best_model_at_end`` the best of them is averaged.

    Args:
        state: Folder of what the next task needs; without it, the callback must be the same object for
            all tasks, and training cannot be resumed by another process.
        options: Those of :class:`~cofima.integrations.loop.ContinualAverage`.
    """

    def __init__(self, *, state: str | Path | None = None, **options: Any) -> None:
        self.folder = None if state is None else Path(state)
        self.options = options
        self.kept: dict[str, Any] = {}
        self.merger: ContinualAverage | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Keep the weights before the task; for a checkpoint that is resumed, those that were kept then."""
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
        """Average, by the training images of the task."""
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
