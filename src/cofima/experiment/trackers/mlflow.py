"""MLflow: a database beside the run, or the server that ``mlflow:URI`` names."""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from cofima.experiment.trackers.scalars import Line, scalars
from cofima.report.groups import flat

NUMBER = "line"
LONGEST = 6000  # characters of a parameter that MLflow takes


class Mlflow:
    """Log to a run of the experiment ``cofima``, which goes on where it was if it is there already."""

    def __init__(self, folder: Path, config: dict[str, Any], where: str) -> None:
        self.folder, self.config = folder, config
        self.uri = where or f"sqlite:///{(folder / 'trackers' / 'mlflow.db').resolve()}"
        self.client: Any = None
        self.run = ""
        self.number = self.known = 0

    def __call__(self, line: Line) -> None:
        """Log the numbers of a line at its step."""
        if self.client is None:
            self._open(line)
        from mlflow.entities import Metric

        self.number += 1
        if self.number > self.known:
            when = int(line["time"] * 1000)
            numbers = scalars(line) | {NUMBER: self.number}
            self.client.log_batch(self.run, [Metric(n, v, when, line["step"]) for n, v in numbers.items()])

    def close(self) -> None:
        """Mark the run as ended."""
        if self.client is not None:
            self.client.set_terminated(self.run)
            self.client = None

    def _open(self, first: Line) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # or it tells its makers of its use
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        if self.uri.startswith("sqlite"):
            (self.folder / "trackers").mkdir(parents=True, exist_ok=True)
        self.client = MlflowClient(tracking_uri=self.uri)
        found = self.client.get_experiment_by_name("cofima")
        experiment = found.experiment_id if found else self.client.create_experiment("cofima")
        name = hashlib.sha256(f"{self.folder.name} {first['time']}".encode()).hexdigest()[:16]
        there = self.client.search_runs([experiment], f"tags.cofima = '{name}'")
        if there:
            self.run = there[0].info.run_id
            self.known = int(there[0].data.metrics.get(NUMBER, 0))
            return
        made = self.client.create_run(experiment, run_name=self.folder.name, tags={"cofima": name})
        self.run = made.info.run_id
        settings = [Param(key, value[:LONGEST]) for key, value in flat(self.config).items()]
        for start in range(0, len(settings), 100):  # so many at a time
            self.client.log_batch(self.run, params=settings[start : start + 100])
