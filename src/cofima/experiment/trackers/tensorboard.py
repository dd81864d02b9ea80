"""TensorBoard: event files beside the run, written anew whenever the run starts or goes on."""

import json
from pathlib import Path
from typing import Any

from cofima.experiment.trackers.scalars import Line, scalars


class TensorBoard:
    """Write event files; ``tensorboard --logdir FOLDER`` shows them."""

    def __init__(self, folder: Path, config: dict[str, Any], where: str) -> None:
        self.folder = Path(where) / folder.name if where else folder / "trackers" / "tensorboard"
        self.config = config
        self.writer: Any = None

    def __call__(self, line: Line) -> None:
        """Add the numbers of a line."""
        if self.writer is None:
            self._open()
        for name, value in scalars(line).items():
            self.writer.add_scalar(name, value, line["step"], walltime=line["time"])
        self.writer.flush()

    def close(self) -> None:
        """Finish the file."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for old in self.folder.glob("events.out.tfevents.*"):  # ours: all lines come again
            old.unlink()
        self.writer = SummaryWriter(str(self.folder))
        self.writer.add_text("config", f"```json\n{json.dumps(self.config, indent=2)}\n```")
