"""One task merged at every share of the new weights, without training it again.

After the merge everything is as the method does it: batch normalisation, Gaussians of the new classes and
the alignment of the head. At the run's own share the weights are those of the run, bit for bit.
"""

from collections.abc import Sequence
from pathlib import Path

from cofima.analyse.kept import choose_task, open_run
from cofima.analyse.lines import Curve, Mark, curves
from cofima.analyse.measure import PARTS, Measure, measure
from cofima.analyse.output import Result
from cofima.analyse.path import NAMES
from cofima.analyse.relearn import Relearned, averaging, relearn
from cofima.progress import SILENT, Progress


def posthoc(
    folder: Path, shares: Sequence[float], task: int | None = None, progress: Progress = SILENT
) -> Result:
    """Merge a task at every share, the run's own too, and measure each."""
    run = open_run(folder)
    averaging(run.method, folder)
    learned = relearn(run, choose_task(run, task), progress)
    own = learned.lam
    every = sorted({*shares, *([] if own is None else [own])})
    found = [sweep_one(learned, lam) for lam in progress.track(every, len(every), "lam")]
    drawn = [Curve(NAMES[part], every, [m.accuracy_on(part) for m in found]) for part in PARTS]
    marks = [] if own is None else [Mark(own, "λ of the run")]
    title = f"{run.label}, task {learned.task.index + 1}: λ after the training"
    figure = curves(drawn, "λ, share of the trained weights", "Accuracy (%)", title, marks)
    images = "held-out training" if run.config.held_out else "test"
    said = [f"λ of the run: {own:g}"] if own is not None else []
    said.append(f"measured on {images} images" + ("" if run.config.held_out else ": do not choose λ by them"))
    return Result("lambda_posthoc", _rows(learned, every, found), {"lambda_posthoc": figure}, said)


def sweep_one(task: Relearned, lam: float) -> Measure:
    """Merge at one share and measure what the method then predicts."""
    model = task.merge_again(lam)
    model.method.net.eval()
    return measure(model.method.predict, task.seen, model.method.context)


def _rows(task: Relearned, shares: Sequence[float], found: Sequence[Measure]) -> list[dict[str, object]]:
    return [
        {
            "run": str(task.run.folder),
            "method": task.run.config.method,
            "task": task.task.index + 1,
            "lam": lam,
            "of_run": lam == task.lam,
        }
        | {f"accuracy_{part}": point.accuracy_on(part) for part in PARTS}
        | {f"loss_{part}": point.loss_on(part) for part in PARTS}
        for lam, point in zip(shares, found, strict=True)
    ]
