"""Continual-learning metrics: pure functions of the accuracy matrix, without rounding.

Row ``t`` holds the accuracies (in %) after task ``t`` on the test images of every task seen so far, so the
matrix is lower triangular; ``sizes`` are the numbers of test images of the tasks.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Summary:
    """Mean over ``n`` seeds; ``std`` is the sample standard deviation (n - 1), None for a single seed."""

    mean: float
    std: float | None
    n: int


def accuracies_over_time(matrix: Matrix, sizes: Sequence[int]) -> list[float]:
    """Return A_t, the accuracy over the test images of all tasks seen, after each task."""
    _check(matrix)
    if len(sizes) != len(matrix):
        raise ValueError(f"expected one test-set size for each of {len(matrix)} tasks, got {len(sizes)}")
    return [_weighted(row, sizes) for row in matrix]


def last(matrix: Matrix, sizes: Sequence[int]) -> float:
    """Return Last-Acc, the accuracy over all classes after the last task: A_T."""
    return accuracies_over_time(matrix, sizes)[-1]


def incremental(matrix: Matrix, sizes: Sequence[int]) -> float:
    """Return Inc-Acc, the mean over tasks of the accuracy after each: mean of A_1 .. A_T."""
    return statistics.fmean(accuracies_over_time(matrix, sizes))


def task_average(matrix: Matrix) -> float:
    """Return the final accuracy averaged over tasks, each with the same weight whatever its size."""
    _check(matrix)
    return statistics.fmean(matrix[-1])


def forgetting(matrix: Matrix) -> float | None:
    """Return the mean drop of each earlier task from its best earlier accuracy to its final one.

    This is the definition of Chaudhry et al. (ECCV 2018): the best accuracy is that before the last task, so
    the value is negative if earlier tasks gained from the last one.
    """
    _check(matrix)
    final = len(matrix) - 1
    if final == 0:
        return None
    best = [max(matrix[t][j] for t in range(j, final)) for j in range(final)]
    return statistics.fmean(best[j] - matrix[final][j] for j in range(final))


def backward_transfer(matrix: Matrix) -> float | None:
    """Return the mean change of each earlier task from when it was learned to the end."""
    _check(matrix)
    final = len(matrix) - 1
    if final == 0:
        return None
    return statistics.fmean(matrix[final][j] - matrix[j][j] for j in range(final))


def forward_transfer(
    before: Sequence[float] | None = None, untrained: Sequence[float] | None = None
) -> float | None:
    """Return the mean gain from earlier tasks on tasks not yet learned, or None if it was not measured.

    Args:
        before: Accuracy on task j just before it is learned, for every task but the first. A head without
            columns for unseen classes cannot provide it; a nearest-mean classifier on the features can.
        untrained: The same accuracies with the network before any task.
    """
    if before is None or untrained is None:
        return None
    if len(before) != len(untrained):
        raise ValueError(f"got {len(before)} accuracies before learning, but {len(untrained)} untrained ones")
    return statistics.fmean(b - u for b, u in zip(before, untrained, strict=True)) if before else None


def intransigence(bound: float | Sequence[float], matrix: Matrix) -> list[float]:
    """Return the gap of each task's accuracy to joint training, just after the task was learned.

    Args:
        bound: Accuracy of joint training on each task, or one number for all of them.
        matrix: The accuracy matrix.
    """
    _check(matrix)
    bounds = [float(bound)] * len(matrix) if isinstance(bound, int | float) else list(bound)
    if len(bounds) != len(matrix):
        raise ValueError(f"expected {len(matrix)} joint accuracies, got {len(bounds)}")
    return [bound - row[-1] for bound, row in zip(bounds, matrix, strict=True)]


def old_new(matrix: Matrix, sizes: Sequence[int]) -> list[tuple[float | None, float]]:
    """Return the accuracy after each task on all earlier tasks (None for the first) and on the new one."""
    accuracies_over_time(matrix, sizes)  # checks both
    return [(_weighted(row[:-1], sizes) if len(row) > 1 else None, row[-1]) for row in matrix]


def summarize(values: Sequence[float]) -> Summary:
    """Return mean and sample standard deviation (n - 1) of one value per seed."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return Summary(statistics.fmean(values), std, len(values))


def _weighted(row: Sequence[float], sizes: Sequence[int]) -> float:
    seen = sizes[: len(row)]
    return sum(a * n for a, n in zip(row, seen, strict=True)) / sum(seen)


def _check(matrix: Matrix) -> None:
    if not matrix:
        raise ValueError("the accuracy matrix has no rows: no task has been learned")
    for t, row in enumerate(matrix, start=1):
        if len(row) != t:
            raise ValueError(f"row {t} of the accuracy matrix has {len(row)} values; expected {t}")
