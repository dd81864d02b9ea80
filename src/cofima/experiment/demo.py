"""The demonstration: the methods of ``demo.yaml`` on the embedded digits, with a table and figures."""

from pathlib import Path

from cofima import report
from cofima.core.progress import SILENT, Progress
from cofima.experiment.grid.cells import cells
from cofima.experiment.launch import launch


def demo(folder: Path, seed: int = 1993, progress: Progress = SILENT) -> list[report.Run]:
    """Learn the embedded stream with every method of the recipe, and write the report beside the runs."""
    runs = {folder / f"{cell.method}-{seed}": cell for cell in cells("demo.yaml", [f"seed={seed}"])}
    for place, config in runs.items():
        launch(config, place, progress)
    found = report.find(runs)
    report.write(found, folder)
    return found
