r"""Features of all layers: pooled outputs of a backbone's blocks, beside its own features.

Intermediate layers see what the last one has learned to ignore, and they move less when the backbone is
fine-tuned. With the backbone's own features :math:`f` and the outputs :math:`h_1, \dots, h_L` of its blocks,
averaged over positions or tokens,

.. math:: \varphi(x) = [\,p(f), p(h_1), \dots, p(h_L)\,], \qquad
          p(z) = \frac{\operatorname{sign}(z) \sqrt{|z|}}{\lVert \sqrt{|z|} \rVert}

Balanced, :math:`p(f)` is multiplied by :math:`\sqrt L`: the last layer is as long as all blocks together.

Ahrens et al., "Read Between the Layers: Leveraging Multi-Layer Representations for Rehearsal-Free Continual
Learning with Pre-Trained Models", 2023, https://arxiv.org/abs/2312.08888, concatenate layers as well,
without the roots.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from cofima.core.errors import CofimaError
from cofima.models.head import power_normalized


def join_layers(backbone: nn.Module, name: str, balanced: bool = False) -> None:
    """Make a backbone return the features of all its layers; its weights and their names stay as they are."""
    found = blocks(backbone)
    if not found:
        setting = "balanced" if balanced else "all"
        raise CofimaError(
            f"model.layers = {setting}: the blocks of backbone '{name}' ({type(backbone).__name__}) are "
            "not known; use model.layers=last"
        )
    joined = _JoinedLayers(len(found) ** 0.5 if balanced else 1)
    channels_last = getattr(backbone, "output_fmt", "NCHW") == "NHWC"
    backbone.register_forward_pre_hook(joined.clear)
    for block in found:
        block.register_forward_hook(joined.keep_last if channels_last else joined.keep)
    backbone.register_forward_hook(joined.join)


def blocks(backbone: nn.Module) -> list[nn.Module]:
    """Return the blocks of a timm model in order, as it groups them for layer-wise learning rates."""
    matcher = getattr(backbone, "group_matcher", None)
    if matcher is None:
        return []
    patterns = matcher(coarse=False).get("blocks", [])
    # timm gives a fixed position to what is no block: stems, norms, downsampling between stages
    patterns = [(patterns, None)] if isinstance(patterns, str) else patterns
    wanted = [pattern for pattern, position in patterns if position is None]
    return [m for name, m in backbone.named_modules() if any(re.fullmatch(p, name) for p in wanted)]


def width(backbone: nn.Module, size: int) -> int:
    """Return the number of features that a backbone returns, from a pass of one image."""
    was_training, like = backbone.training, next(backbone.parameters())
    with torch.inference_mode():
        features = backbone.eval()(torch.zeros(1, 3, size, size, dtype=like.dtype, device=like.device))
    backbone.train(was_training)
    return int(features.shape[1])


class _JoinedLayers:
    """Forward hooks that collect the pooled outputs of blocks and join them with the final features."""

    def __init__(self, last: float) -> None:
        self.last = last
        self.pooled: list[Tensor] = []

    def clear(self, module: nn.Module, given: Any) -> None:
        """Forget what a pass that failed may have left."""
        self.pooled = []

    def keep(self, module: nn.Module, given: Any, output: Tensor) -> None:
        """Keep the mean over tokens [B, T, C] or positions [B, C, H, W]."""
        self.pooled.append(output.mean((2, 3)) if output.ndim == 4 else output.mean(1))

    def keep_last(self, module: nn.Module, given: Any, output: Tensor) -> None:
        """Keep the mean over positions [B, H, W, C]."""
        self.pooled.append(output.flatten(1, -2).mean(1))

    def join(self, module: nn.Module, given: Any, features: Tensor) -> Tensor:
        """Return the features of all layers, each of a block at unit length."""
        blocks, self.pooled = self.pooled, []
        return torch.cat([self.last * power_normalized(features), *map(power_normalized, blocks)], 1)
