"""The demonstration: five methods on the embedded digits, one table, one page of figures."""

from pathlib import Path

from cofima import report
from cofima.core.progress import SILENT, Progress
from cofima.experiment import config
from cofima.experiment.launch import launch

METHODS = ("joint", "seq_ft", "slca", "coma", "cofima")


def demo(folder: Path, seed: int = 1993, progress: Progress = SILENT) -> list[report.Run]:
    """Learn the embedded stream with every demonstration method, and write the report beside the runs."""
    configs = {method: config.read("demo.yaml", [f"method={method}", f"seed={seed}"]) for method in METHODS}
    for method, how in configs.items():
        launch(how, folder / f"{method}-{seed}", progress)
    runs = report.find([folder / f"{method}-{seed}" for method in METHODS])
    report.write(runs, folder)
    return runs
