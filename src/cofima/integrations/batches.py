"""Logits and labels from the batches of any data loader."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cofima.core.errors import CofimaError
from cofima.weights.fisher.inputs import place

Forward = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""Function that returns logits and labels of a batch; it must call the model that it is given."""

LABELS = ("labels", "label")


def classify(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return logits and labels of a pair ``(inputs, labels)``, or of a mapping with ``labels``.

    Logits are the model's output, or its entry ``logits``. The other entries of a mapping are passed to the
    model as keyword arguments, as in transformers.
    """
    inputs, labels = _parts(batch)
    output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    if not isinstance(output, Tensor):
        output = output["logits"] if isinstance(output, Mapping) else getattr(output, "logits", output)
    return output, labels


def _parts(batch: Any) -> tuple[Any, Tensor]:
    """Return inputs and labels of a batch in one of the usual formats."""
    if isinstance(batch, Mapping):
        found = [key for key in LABELS if key in batch]
        if found:
            return {key: value for key, value in batch.items() if key != found[0]}, batch[found[0]]
        names = ", ".join(map(str, batch))
        raise CofimaError(f"a batch has no entry 'labels' (it has {names}): say with forward= where they are")
    if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) >= 2:
        return batch[0], batch[1]
    raise CofimaError(
        f"a batch is {type(batch).__name__}, neither a pair of inputs and labels nor a mapping with labels: "
        "say with forward= how it becomes logits and labels"
    )


class Logits(nn.Module):
    """Module that maps whole batches to logits."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model = model
        self.call = forward or classify
        self.usual = forward is None

    def forward(self, batch: Any) -> Tensor:
        """Return the logits of a batch."""
        return self.call(self.model, batch)[0]

    def labels(self, batch: Any) -> Tensor:
        """Return the labels of a batch; a custom ``forward`` is called for them, without gradients."""
        if self.usual:
            return _parts(batch)[1]
        with torch.no_grad():
            return self.call(self.model, batch)[1]

    def placed(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield batches on the model's device and in its dtype."""
        first = next((p for p in self.model.parameters() if p.is_floating_point()), torch.empty(0))
        for batch in loader:
            yield place(batch, first.device, first.dtype)
