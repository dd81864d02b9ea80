"""MLflow tracker: a database in the run's folder, or the server of ``mlflow:URI``."""

import logging
import os
from typing import Any

from cofima.core.settings import flat
from cofima.experiment.metrics_log import LogLine
from cofima.experiment.trackers.base import Tracker

NUMBER = "line"  # metric that counts the logged lines
LONGEST = 6000  # maximum length of an MLflow parameter


class Mlflow(Tracker):
    """Tracker that logs to a run of the experiment ``cofima``, and resumes it if it exists."""

    client: Any
    run: str

    def open(self, first: LogLine) -> None:
        """Find the run by its tag, or create it with the configuration as parameters."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # no usage reports to the vendor
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        place = self.place("mlflow.db")
        uri = self.where or f"sqlite:///{place.resolve()}"
        if uri.startswith("sqlite"):
            place.parent.mkdir(parents=True, exist_ok=True)
        self.client = MlflowClient(tracking_uri=uri)
        found = self.client.get_experiment_by_name("cofima")
        experiment = found.experiment_id if found else self.client.create_experiment("cofima")
        tag = self.run_id(first)
        there = self.client.search_runs([experiment], f"tags.cofima = '{tag}'")
        if there:
            self.run = there[0].info.run_id
            self.known = int(there[0].data.metrics.get(NUMBER, 0))
            return
        created = self.client.create_run(experiment, run_name=self.folder.name, tags={"cofima": tag})
        self.run = created.info.run_id
        settings = [Param(key, value[:LONGEST]) for key, value in flat(self.config).items()]
        for start in range(0, len(settings), 100):  # MLflow's limit per call
            self.client.log_batch(self.run, params=settings[start : start + 100])

    def log(self, line: LogLine, numbers: dict[str, float]) -> None:
        """Log the metrics of a line at its step."""
        from mlflow.entities import Metric

        when, numbers = int(line["time"] * 1000), numbers | {NUMBER: self.sent}
        self.client.log_batch(self.run, [Metric(n, v, when, line["step"]) for n, v in numbers.items()])

    def finish(self) -> None:
        """Mark the run as finished."""
        self.client.set_terminated(self.run)
