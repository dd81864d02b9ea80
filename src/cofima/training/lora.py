r"""LoRA: low-rank updates of the backbone's layers, whose other parameters stay frozen.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, https://arxiv.org/abs/2106.09685.

.. math:: W = W_0 + \frac{\alpha}{r}\, B A, \qquad B \in \mathbb R^{m \times r},\ A \in \mathbb R^{r \times n}

:math:`A` is random and :math:`B = 0` at the start of each task. The kernel of a convolution is treated as a
matrix with one row per output channel: :math:`A` is then a convolution of the same size, stride and padding
to :math:`r` channels, and :math:`B` a 1x1 convolution.

The network always holds the merged weights :math:`W` under their usual names; the factors are kept outside
of it. So everything that reads weights during training (penalties, moving averages, checkpoints, gradient
synchronization, predictions) reads the effective ones, and nothing has to be merged at the end. The
gradients of the factors follow from that of :math:`W`:

.. math:: \frac{\partial L}{\partial B} = \frac{\alpha}{r}\, \frac{\partial L}{\partial W} A^\top, \qquad
          \frac{\partial L}{\partial A} = \frac{\alpha}{r}\, B^\top \frac{\partial L}{\partial W}
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cofima.training.options import LoraOptions

ATTENTION = ("attn", "attention")  # substrings of the names of attention modules in timm


class LowRank:
    """Low-rank factors, and the weights that hold the merged result."""

    def __init__(self, weights: list[nn.Parameter], options: LoraOptions, generator: torch.Generator) -> None:
        self.weights, self.scale, rank = weights, options.scale, options.rank or 0
        self.start = [weight.detach().flatten(1).clone() for weight in weights]
        self.down = [_uniform(rank, start, generator) for start in self.start]
        self.up = [nn.Parameter(start.new_zeros(len(start), rank)) for start in self.start]

    def parameters(self) -> list[nn.Parameter]:
        """Return the factors, which the optimizer updates in place of the weights."""
        return [*self.down, *self.up]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Turn the gradients of the weights into those of the factors."""
        for weight, down, up in zip(self.weights, self.down, self.up, strict=True):
            if weight.grad is None:  # the loss does not depend on this layer
                continue
            gradient = self.scale * weight.grad.flatten(1)
            down.grad, up.grad = up.T @ gradient, gradient @ down.T
            weight.grad = None  # the optimizer does not hold this weight: its zero_grad() would not clear it

    @torch.no_grad()
    def write_weights(self) -> None:
        """Write the merged weights into the network."""
        for weight, start, down, up in zip(self.weights, self.start, self.down, self.up, strict=True):
            weight.copy_(torch.addmm(start, up, down, alpha=self.scale).view_as(weight))


NO_FACTORS = LowRank([], LoraOptions(), torch.Generator())


@contextmanager
def low_rank(backbone: nn.Module, options: LoraOptions, generator: torch.Generator) -> Iterator[LowRank]:
    """Restrict updates of a backbone to low-rank factors within the context; a no-op without a rank.

    Frozen parameters stay frozen: a layer with a frozen weight gets no factors.
    """
    if not options.rank:
        yield NO_FACTORS
        return
    weights = [weight for weight in adapted(backbone, options) if weight.requires_grad]
    moving = {id(weight) for weight in weights}
    held = [w for w in backbone.parameters() if w.requires_grad and id(w) not in moving]
    for weight in held:
        weight.requires_grad_(False)
    try:
        yield LowRank(weights, options, generator)
    finally:
        for weight in held:
            weight.requires_grad_(True)


def adapted(backbone: nn.Module, options: LoraOptions) -> list[nn.Parameter]:
    """Return the weights that get factors, as selected by ``options.layers``."""
    found = dense_weights(backbone)
    chosen = (options.layers == "all" or any(word in name.lower() for word in ATTENTION) for name in found)
    return [weight for weight, taken in zip(found.values(), chosen, strict=True) if taken]


def dense_weights(backbone: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of linear layers and ungrouped convolutions, by name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}  # keyed by id: a tied weight is listed once
    for name, layer in backbone.named_modules():
        dense = isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
        if dense and isinstance(weight := layer.weight, nn.Parameter):
            found.setdefault(id(weight), (f"{name}.weight".removeprefix("."), weight))
    return dict(found.values())


def lora_problem(backbone: nn.Module, options: LoraOptions) -> str:
    """Return why a backbone cannot be trained with these options, or an empty string if it can."""
    if not options.rank or adapted(backbone, options):
        return ""
    if options.layers == "attention":
        missing = "no attention layer; use train.lora.layers=all"
    else:
        missing = "no linear layer and no ungrouped convolution, so that nothing would move; leave LoRA out"
    return f"train.lora.layers = {options.layers}: this backbone, a {type(backbone).__name__}, has {missing}"


def _uniform(rank: int, weight: Tensor, generator: torch.Generator) -> nn.Parameter:
    """Return a random factor, initialized like the weight of a new linear layer with as many inputs."""
    inputs = weight.shape[1]
    bound = 1 / math.sqrt(inputs)
    drawn = torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
    return nn.Parameter(drawn.to(weight))
