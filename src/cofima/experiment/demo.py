"""The demo: the methods of ``demo.yaml`` on the embedded digits, with a table and figures."""

from pathlib import Path

from cofima import report
from cofima.experiment.grid.cells import cells, reduced
from cofima.experiment.grid.executors.base import Executor
from cofima.experiment.grid.scheduler import GridOutcome, Watch, run_grid
from cofima.store.config import Config


def demo(
    folder: Path, executor: Executor, watch: Watch, *, seed: int = 1993, quick: bool = False
) -> GridOutcome:
    """Learn the embedded stream with every method of the recipe, and write the report next to the runs.

    ``quick`` uses two images per class; its accuracies are meaningless.
    """
    changes = reduced(2, [f"seed={seed}"]) if quick else [f"seed={seed}"]
    runs = [_shortened(cell) if quick else cell for cell in cells("demo.yaml", changes)]
    outcome = run_grid(runs, folder, executor=executor, watch=watch)
    if not outcome.failed:
        report.write(report.find(outcome.done), folder)
    return outcome


def _shortened(config: Config) -> Config:
    """Return a configuration with a short alignment, if the method aligns its head."""
    align = config.options.get("align")
    options = config.options | ({"align": align | {"epochs": 5}} if align else {})
    return config.model_copy(update={"options": options})
