"""TensorBoard tracker: event files in the run's folder, rewritten whenever the run starts or resumes."""

import json
from pathlib import Path
from typing import Any

from cofima.experiment.metrics_log import LogLine
from cofima.experiment.trackers.base import Tracker


class TensorBoard(Tracker):
    """Tracker that writes event files; ``tensorboard --logdir FOLDER`` shows them."""

    writer: Any

    def open(self, first: LogLine) -> None:
        """Start a new event file, replacing old ones."""
        from torch.utils.tensorboard import SummaryWriter

        place = Path(self.where) / self.folder.name if self.where else self.place("tensorboard")
        for old in place.glob("events.out.tfevents.*"):  # all lines are sent again
            old.unlink()
        self.writer = SummaryWriter(str(place))
        self.writer.add_text("config", f"```json\n{json.dumps(self.config, indent=2)}\n```")

    def log(self, line: LogLine, numbers: dict[str, float]) -> None:
        """Add the metrics of a line."""
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, line["step"], walltime=line["time"])
        self.writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()
