"""What methods share that replace the backbone by an average, or keep weights until the next task."""

from collections.abc import Iterable

import torch
from torch import Tensor

from cofima.models.net import Net
from cofima.parts.batchnorm import refresh_batchnorm, statistics_moved
from cofima.weights.average import average
from cofima.weights.distance import weight_distance
from cofima.weights.pieces import Weights


def merge_backbone(net: Net, old: Weights, lam: float, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Replace the backbone by its average with ``old``, in place; ``lam`` is the share of its own weights.

    Batch normalisation is estimated anew on ``batches``; endpoints have their own statistics already.
    """
    new = net.backbone.state_dict()
    moved = distance_moved(old, net) > 0 and statistics_moved(old, new)
    average(old, new, lam, out=new)
    if 0 < lam < 1 and moved:
        refresh_batchnorm(net, batches)


def distance_moved(old: Weights, net: Net) -> float:
    """Return how far the parameters of the backbone are from what they were."""
    return weight_distance(old, {key: value.detach() for key, value in net.backbone.named_parameters()})


def tagged(tag: str, weights: Weights) -> Weights:
    """Return weights under names that start with ``tag``, as a method's state keeps them."""
    return {f"{tag}.{key}": value for key, value in weights.items()}


def untagged(tag: str, state: Weights, device: torch.device) -> Weights:
    """Return what :func:`tagged` put into a state, under its own names."""
    kept = {key.removeprefix(f"{tag}."): value for key, value in state.items() if key.startswith(f"{tag}.")}
    return {key: value.to(device) for key, value in kept.items()}
