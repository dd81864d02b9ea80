"""What methods share that replace the backbone by an average, or keep weights until the next task."""

from collections.abc import Iterable

from torch import Tensor

from cofima.methods.state import Entry
from cofima.models.net import Net
from cofima.parts.batchnorm import refresh_batchnorm, statistics_moved
from cofima.weights.average import average
from cofima.weights.distance import weight_distance
from cofima.weights.pieces import Weights

START = Entry("start.", merge="last", same_start=True)


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
