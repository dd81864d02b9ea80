"""Continual averaging for Avalanche strategies: one experience is one task."""

from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from cofima.core.extras import import_extra
from cofima.integrations.loop import ContinualAverage

SupervisedPlugin: Any = import_extra("avalanche.core", "avalanche").SupervisedPlugin


class CoFiMAPlugin(SupervisedPlugin):  # type: ignore[misc]
    """Plugin that averages the weights before and after each experience.

    Growing heads of Avalanche are matched by rows.

    Args:
        options: Options of :class:`~cofima.integrations.loop.ContinualAverage`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = {"forward": _forward} | options
        self.merger: ContinualAverage | None = None

    def before_training_exp(self, strategy: Any, *_: Any, **__: Any) -> None:
        """Store the weights before the experience, without the rows already added for its classes."""
        if self.merger is None:
            self.merger = ContinualAverage(strategy.model, **self.options)
        self.merger.begin()

    def after_training_exp(self, strategy: Any, *_: Any, **__: Any) -> None:
        """Average the weights, using the images of the experience."""
        assert self.merger is not None
        data = strategy.experience.dataset
        collate = getattr(data, "collate_fn", None)
        self.merger.end(DataLoader(data, strategy.train_mb_size, collate_fn=collate))


def _forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return logits and labels of an Avalanche batch: images, labels and task labels."""
    call = import_extra("avalanche.models", "avalanche").avalanche_forward
    return call(model, batch[0], batch[-1]), batch[1]
