"""Continual averaging for the strategies of Avalanche: one experience is one task."""

from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from cofima.core.extras import import_extra
from cofima.integrations.loop import ContinualAverage

SupervisedPlugin: Any = import_extra("avalanche.core", "avalanche").SupervisedPlugin


class CoFiMAPlugin(SupervisedPlugin):  # type: ignore[misc]
    """Average the strategy's model with itself before each experience, when its training ends.

    Heads that Avalanche lets grow are matched by rows.

    Args:
        options: Those of :class:`~cofima.integrations.loop.ContinualAverage`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = {"forward": _forward} | options
        self.merger: ContinualAverage | None = None

    def before_training_exp(self, strategy: Any, *_: Any, **__: Any) -> None:
        """Keep the weights before the experience; rows of its classes are there already, and left out."""
        if self.merger is None:
            self.merger = ContinualAverage(strategy.model, **self.options)
        self.merger.begin()

    def after_training_exp(self, strategy: Any, *_: Any, **__: Any) -> None:
        """Average, by the images of the experience."""
        assert self.merger is not None
        data = strategy.experience.dataset
        collate = getattr(data, "collate_fn", None)
        self.merger.end(DataLoader(data, strategy.train_mb_size, collate_fn=collate))


def _forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return logits and labels of Avalanche's batches: images, labels, and the number of each's task."""
    call = import_extra("avalanche.models", "avalanche").avalanche_forward
    return call(model, batch[0], batch[-1]), batch[1]
