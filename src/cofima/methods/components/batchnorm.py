"""Re-estimation of batch normalization statistics for merged weights."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cofima.training.loop import batchnorm_layers


def statistics_moved(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> bool:
    """Return True if training changed the running statistics; if not, they need no new estimate."""
    kept = [key for key in old if key.endswith((".running_mean", ".running_var"))]
    return any(not torch.equal(old[key].to(new[key]), new[key]) for key in kept)


@torch.no_grad()
def refresh_batchnorm(net: nn.Module, batches: Iterable[tuple[Any, Any]]) -> bool:
    """Replace running means and variances by averages over ``batches``; return False without BatchNorm."""
    layers = batchnorm_layers(net)
    if not layers:
        return False
    momenta = [layer.momentum for layer in layers]
    counts = [layer.num_batches_tracked.clone() for layer in layers if layer.num_batches_tracked is not None]
    net.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # cumulative average: every batch has the same weight
        layer.train()
    for images, _ in batches:
        net(images)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    for layer, count in zip(layers, counts, strict=False):
        layer.num_batches_tracked = count
    net.eval()
    return True
