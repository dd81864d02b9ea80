"""Linear head that grows by one block per task, the same on power-normalized features, and cosine head."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

_SMOOTH = 1e-6  # added to features below the root, whose gradient at 0 would be infinite


class Head(nn.Module):
    """Linear head with one ``Linear`` block per task; their concatenated outputs are the logits."""

    def __init__(self, features: int, sizes: Sequence[int] = ()) -> None:
        super().__init__()
        self.features = features
        self.blocks = nn.ModuleList(_block(features, size) for size in sizes)

    @property
    def sizes(self) -> list[int]:
        """Number of classes per block."""
        return [int(block.out_features) for block in self._linear()]

    @property
    def spans(self) -> list[slice]:
        """Columns of the logits of each block."""
        return [slice(a, b) for a, b in pairwise(accumulate(self.sizes, initial=0))]

    def grow(self, classes: int, generator: torch.Generator | None = None) -> None:
        """Add a block for new classes: truncated normal weights (std 0.02), zero bias."""
        block = nn.Linear(self.features, classes)
        nn.init.trunc_normal_(block.weight, std=0.02, generator=generator)
        nn.init.zeros_(block.bias)
        there = next(self.parameters(), None)
        self.blocks.append(block if there is None else block.to(there))

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of all classes seen."""
        return self.linear(features)

    def linear(self, features: Tensor) -> Tensor:
        """Return the outputs of the blocks."""
        if not len(self.blocks):
            return features.new_zeros(len(features), 0)
        return torch.cat([block(features) for block in self.blocks], dim=1)

    def flat(self) -> dict[str, Tensor]:
        """Return all blocks as one weight [classes, features] and one bias [classes]."""
        blocks = list(self._linear())
        if not blocks:
            return {"weight": torch.zeros(0, self.features), "bias": torch.zeros(0)}
        return {
            "weight": torch.cat([block.weight.detach() for block in blocks]),
            "bias": torch.cat([block.bias.detach() for block in blocks]),
        }

    @torch.no_grad()
    def load_flat(self, weight: Tensor, bias: Tensor) -> None:
        """Load weight and bias as returned by :meth:`flat`."""
        for block, span in zip(self._linear(), self.spans, strict=True):
            block.weight.copy_(weight[span])
            block.bias.copy_(bias[span])

    def _linear(self) -> Iterator[nn.Linear]:
        for block in self.blocks:
            assert isinstance(block, nn.Linear)
            yield block


def _block(features: int, size: int) -> nn.Linear:
    block = nn.Linear(features, max(size, 1))
    if not size:  # all classes were removed; torch would warn about a layer without rows
        block.weight, block.bias = (nn.Parameter(part[:0].detach()) for part in (block.weight, block.bias))
        block.out_features = 0
    return block


def power_normalized(features: Tensor) -> Tensor:
    r"""Return :math:`x_i / \sqrt{|x_i|}`, the signed square root of each feature, scaled to unit length.

    Perronnin, Sánchez and Mensink, "Improving the Fisher Kernel for Large-Scale Image Classification", ECCV
    2010. A few large features no longer dominate the distance between two images, nor does their length.
    """
    return normalize(features * (features.abs() + _SMOOTH).rsqrt(), dim=1)


class PowerHead(Head):
    """Linear head on power-normalized features."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of all classes seen."""
        return self.linear(power_normalized(features))


class CosineHead(Head):
    """Head whose logits are cosine similarities times a learned scale."""

    def __init__(self, features: int, classes: int, generator: torch.Generator) -> None:
        super().__init__(features)
        bound = 1 / math.sqrt(features)
        self.weight = nn.Parameter(
            torch.empty(classes, features).uniform_(-bound, bound, generator=generator)
        )
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        """Return the scaled cosine similarities between features and rows."""
        return self.scale * linear(normalize(features), normalize(self.weight))
