"""Weights & Biases: offline, beside the run, unless ``wandb:online`` is asked for."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from cofima.experiment.trackers.scalars import Line, scalars


class Wandb:
    """Log to a run of the project ``cofima``; ``wandb sync`` sends what was written offline."""

    def __init__(self, folder: Path, config: dict[str, Any], where: str) -> None:
        self.folder, self.config = folder, config
        self.online = where == "online"
        self.run: Any = None
        self.number = self.known = 0

    def __call__(self, line: Line) -> None:
        """Log the numbers of a line, at its number in the file: wandb's steps must grow."""
        if self.run is None:
            self._open(line)
        self.number += 1
        if self.number > self.known:
            self.run.log(scalars(line) | {"step": line["step"]}, step=self.number)

    def close(self) -> None:
        """Finish the run."""
        if self.run is not None:
            self.run.finish()
            self.run = None

    def _open(self, first: Line) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # or it reports its own crashes
        import wandb

        place = self.folder / "trackers"
        if not self.online:
            shutil.rmtree(place / "wandb", ignore_errors=True)  # ours: all lines come again
        place.mkdir(parents=True, exist_ok=True)
        # online the same run goes on; offline each is whole, and wandb may still hold the one before
        name = hashlib.sha256(f"{self.folder.name} {first['time']}".encode()).hexdigest()[:16]
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "cofima"),
            name=self.folder.name,
            id=name if self.online else None,
            resume="allow" if self.online else None,
            mode="online" if self.online else "offline",
            dir=str(place),
            config=self.config,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
        )
        self.known = int(self.run.summary.get("_step", 0)) if self.online else 0
