"""Averaging of weights in place, with batch normalization and the distance moved."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from cofima.data.stream import Task
from cofima.methods.components.batchnorm import refresh_batchnorm, statistics_moved
from cofima.methods.state import Entry
from cofima.training.context import Context
from cofima.training.loop import plain_batches
from cofima.weights.distance import weight_distance
from cofima.weights.ops import Weights

START = Entry("start.", merge="last", same_start=True)


@contextmanager
def averaged_in_place(
    module: nn.Module, old: Weights, lam: float, task: Task, context: Context, *, moved: bool = True
) -> Iterator[Weights]:
    """Yield the module's own weights, to be overwritten by an average with ``old`` at the share ``lam``.

    Batch normalization is then estimated anew on the task's images; not, for methods that average the
    backbone alone, where its parameters have not ``moved``.
    """
    weights = module.state_dict()
    with refreshed(module, old, weights, lam, plain_batches(task.train, context, "batch norm"), moved=moved):
        yield weights


@contextmanager
def refreshed(
    module: nn.Module,
    old: Weights,
    weights: Weights,
    lam: float,
    batches: Iterable[tuple[Any, Any]],
    *,
    moved: bool = True,
) -> Iterator[None]:
    """Estimate batch normalization anew on exit, by batches of inputs with labels, if that is called for.

    The average of two running variances is not the variance of the averaged network. It is not called for
    where training left the statistics alone, nor at the endpoints of the average, which have statistics
    of their own.
    """
    stale = moved and 0 < lam < 1 and statistics_moved(old, weights)
    yield
    if stale:
        refresh_batchnorm(module, batches)


def distance_moved(old: Weights, backbone: nn.Module) -> float:
    """Return the Euclidean distance of a backbone's parameters from their old values."""
    return weight_distance(old, dict(backbone.named_parameters()))
