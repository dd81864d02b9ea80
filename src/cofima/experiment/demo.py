"""The demonstration: the methods of ``demo.yaml`` on the embedded digits, with a table and figures."""

from pathlib import Path

from cofima import report
from cofima.core.progress import SILENT, Progress
from cofima.experiment.grid.cells import cells, reduced
from cofima.experiment.launch import launch
from cofima.store.config import Config


def demo(
    folder: Path, seed: int = 1993, progress: Progress = SILENT, quick: bool = False
) -> list[report.Run]:
    """Learn the embedded stream with every method of the recipe, and write the report beside the runs.

    ``quick`` takes two images a class, whose accuracies say nothing.
    """
    changes = reduced(2, [f"seed={seed}"]) if quick else [f"seed={seed}"]
    end = "-quick" if quick else ""
    runs = {folder / f"{cell.method}-{seed}{end}": cell for cell in cells("demo.yaml", changes)}
    for place, config in runs.items():
        launch(_shortened(config) if quick else config, place, progress)
    found = report.find(runs)
    report.write(found, folder)
    return found


def _shortened(config: Config) -> Config:
    """Return a configuration with a short alignment, where the method aligns its head."""
    align = config.options.get("align")
    options = config.options | ({"align": align | {"epochs": 5}} if align else {})
    return config.model_copy(update={"options": options})
