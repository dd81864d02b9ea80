r"""Linear interpolation between the weights before a task and those after its training.

.. math:: \theta(a) = (1 - a)\, \theta^*_{t-1} + a\, \theta_t, \qquad
          \text{barrier} = \max_a \big[ L(a) - (1 - a) L(0) - a L(1) \big]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cofima.analysis.evaluate_at import AXES, NAMES, PARTS, Evaluator, HeadKind, Measured, Measurement
from cofima.analysis.output import Result
from cofima.analysis.relearn import Relearned, refuse_unsuited, relearn
from cofima.analysis.run_folder import choose_task, open_run
from cofima.core.progress import SILENT, Progress
from cofima.methods.components.aligned import Aligned
from cofima.report.drawing import Curve, curves
from cofima.weights.average import average


@dataclass(frozen=True)
class MeasuredPath:
    """Measurements at each share of the trained weights."""

    shares: list[float]
    measures: list[Measurement]

    def barrier(self, part: str) -> float:
        """Return the largest rise of the loss above linear interpolation between its ends, at least 0."""
        losses = [point.mean("loss", part) for point in self.measures]
        pairs = zip(self.shares, losses, strict=True)
        return max(loss - (1 - a) * losses[0] - a * losses[-1] for a, loss in pairs)


def path(
    folder: Path,
    task: int | None = None,
    points: int = 11,
    head: HeadKind = "raw",
    images: int | None = None,
    progress: Progress = SILENT,
) -> Result:
    """Measure loss and accuracy on the line from the weights before a task to those after its training."""
    run = open_run(folder)
    refuse_unsuited(run)
    learned = relearn(run, choose_task(run, task), progress)
    shares = [k / (points - 1) for k in range(points)]
    line = measure_path(learned, Evaluator(learned, head, images), shares, progress)
    said = [f"barrier on {NAMES[part]}: {line.barrier(part):.4g}" for part in PARTS]
    title = f"{run.label}, task {learned.task.index + 1}"
    figures = {
        "path": _draw(line, learned, title, "accuracy"),
        "path_loss": _draw(line, learned, title, "loss"),
    }
    return Result("path", _rows(line, learned, head), figures, said)


def measure_path(
    task: Relearned, evaluator: Evaluator, shares: Sequence[float], progress: Progress
) -> MeasuredPath:
    """Measure the network at each share of the trained weights.

    Batch-norm statistics are re-estimated, except at the ends, which keep their own.
    """
    found = []
    for share in progress.track(shares, len(shares), "path"):
        between = average(task.old, task.trained, share)
        found.append(evaluator.measure(between, statistics=share in (0, 1)))
    return MeasuredPath(list(shares), found)


def _rows(line: MeasuredPath, task: Relearned, head: str) -> list[dict[str, object]]:
    return [
        task.columns()
        | {"head": head, "lam_of_run": task.lam, "share": share}
        | found.columns()
        | {f"barrier_{part}": line.barrier(part) for part in PARTS}
        for share, found in zip(line.shares, line.measures, strict=True)
    ]


def _draw(line: MeasuredPath, task: Relearned, title: str, measured: Measured) -> str:
    drawn = [
        Curve(NAMES[part], line.shares, [m.mean(measured, part) for m in line.measures]) for part in PARTS
    ]
    method = task.before.method
    # then the merged network is not on this line but towards θ_0, so its λ is not marked
    elsewhere = isinstance(method, Aligned) and method.averages_with == "pretrained"
    mark = None if elsewhere else task.lam
    return curves(drawn, "Share of the trained weights", AXES[measured], title, mark=mark)
