"""In-place weight averaging, with updated batch normalization statistics."""

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
    """Yield the module's own weights, to be overwritten with their average with ``old`` at share ``lam``.

    On exit, batch normalization statistics are re-estimated on the task's images if needed. Methods that
    average only the backbone pass ``moved=False`` if training did not change its parameters.
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
    """Re-estimate batch normalization statistics on exit, from batches of inputs and labels, if needed.

    The average of two running variances is not the variance of the averaged network. No new estimate is
    needed if training did not change the statistics, or at the endpoints of the average, which have their
    own.
    """
    stale = moved and 0 < lam < 1 and statistics_moved(old, weights)  # before the average overwrites them
    yield
    if stale:
        refresh_batchnorm(module, batches)


def distance_moved(old: Weights, backbone: nn.Module) -> float:
    """Return the Euclidean distance of a backbone's parameters from their old values."""
    return weight_distance(old, dict(backbone.named_parameters()))
