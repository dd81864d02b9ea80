"""Weights & Biases tracker: offline in the run's folder, unless ``wandb:online`` is given."""

import os
import shutil
from typing import Any

from cofima.experiment.metrics_log import LogLine
from cofima.experiment.trackers.base import Tracker


class Wandb(Tracker):
    """Tracker that logs to a run of the project ``cofima``; ``wandb sync`` uploads offline runs."""

    run: Any

    def open(self, first: LogLine) -> None:
        """Resume the run online; offline, where wandb cannot resume, write it again."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no crash reports to the vendor
        import wandb

        online, place = self.where == "online", self.place("wandb").parent
        if not online:
            shutil.rmtree(place / "wandb", ignore_errors=True)  # all lines are sent again
        place.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "cofima"),
            name=self.folder.name,
            id=self.run_id(first) if online else None,
            resume="allow" if online else None,
            mode="online" if online else "offline",
            dir=str(place),
            config=self.config,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
        )
        self.known = int(self.run.summary.get("_step", 0)) if online else 0

    def log(self, line: LogLine, numbers: dict[str, float]) -> None:
        """Log the metrics of a line, with its line number as the step: wandb's steps must increase."""
        self.run.log(numbers | {"step": line["step"]}, step=self.sent)

    def finish(self) -> None:
        """Finish the run."""
        self.run.finish()
