"""Network: a backbone and a growing head."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cofima.models.head import Head


class Net(nn.Module):
    """Backbone and head; ``net(images)`` returns the logits of all classes seen."""

    def __init__(self, backbone: nn.Module, features: int, sizes: Sequence[int] = ()) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = Head(features, sizes)

    def features(self, images: Tensor) -> Tensor:
        """Return one feature vector per image, the input of the head."""
        result: Tensor = self.backbone(images)
        return result

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of all classes seen."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def grow(self, classes: int, generator: torch.Generator, *, freeze: bool = True) -> None:
        """Add a block of new classes; frozen old blocks get neither gradients nor weight decay."""
        self.head.blocks.requires_grad_(not freeze)
        self.head.grow(classes, generator)
        self.head.to(next(self.backbone.parameters(), torch.empty(0)).device)
