"""Figures of groups of runs, as SVG text; the same runs give byte-identical files."""

from collections.abc import Callable, Sequence

from cofima.report import metrics
from cofima.report.drawing import Curve, canvas, curves, squares, svg
from cofima.report.groups import Group
from cofima.report.runs import Run


def accuracy(groups: Sequence[Group]) -> str | None:
    """Draw the accuracy on all classes seen, after each task; upper bounds are dashed lines."""
    return _lines(
        groups,
        lambda run: list(metrics.accuracies_over_time(run.matrix, run.sizes)) if run.history else [],
        "Accuracy on classes seen (%)",
    )


def distance(groups: Sequence[Group]) -> str | None:
    """Draw the distance of the backbone from its pre-trained weights, after each task.

    Methods that learn all classes at once are left out if there are others: they may move a hundred times as
    far, which would flatten the other curves.
    """
    groups = [group for group in groups if not group.all_at_once] or groups
    return _lines(groups, lambda run: run.distances, "Distance from the start")


def matrix(group: Group) -> str | None:
    """Draw the accuracy after each task (rows) on each task (columns), averaged over seeds."""
    tasks = len(group.runs[0].history)
    if group.all_at_once or not tasks:
        return None
    values = [
        [metrics.summarize([run.matrix[t][j] for run in group.runs]).mean for j in range(t + 1)]
        for t in range(tasks)
    ]
    side = max(2.8, 1.1 + 0.3 * tasks)
    with canvas(side, side) as figure:
        axes = figure.add_subplot()
        squares(axes, values, 100, 1, lambda value: f"{value:.0f}")
        axes.set(xlabel="Accuracy (%) on task", ylabel="After task")
        axes.set(xticks=_ticks(tasks), yticks=_ticks(tasks))
        return svg(figure)


def _lines(groups: Sequence[Group], value: Callable[[Run], Sequence[float | None]], up: str) -> str | None:
    """Draw one line per group with a band of one standard deviation; None if there is nothing to draw."""
    drawn = [_over_seeds(group, [value(run) for run in group.runs]) for group in groups]
    if not any(curve.y for curve in drawn):
        return None
    tasks = max(group.runs[0].planned for group in groups)
    return curves(drawn, "After task", up, xlim=(0.7, tasks + 0.3), xticks=_ticks(tasks))


def _over_seeds(group: Group, runs: Sequence[Sequence[float | None]]) -> Curve:
    """Return mean and standard deviation after each task for which every seed has a value."""
    points = {
        t: metrics.summarize([value for value in values if value is not None])
        for t, values in enumerate(zip(*runs, strict=True), start=1)
        if None not in values
    }
    means, spread = [s.mean for s in points.values()], [s.std or 0.0 for s in points.values()]
    return Curve(group.label, list(points), means, spread, level=group.all_at_once)


def _ticks(tasks: int) -> list[int]:
    """Return tick positions: all tasks, or every second, fifth, ... if there are many."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, tasks) if tasks / step <= 12 or step == tasks)
    return list(range(1, tasks + 1)) if step == 1 else [1, *range(step, tasks + 1, step)]
