"""Where the cells of a grid run: on this machine, on a Ray cluster, or below Slurm."""

import os
from collections.abc import Sequence
from pathlib import Path

from cofima.core.errors import CofimaError
from cofima.experiment.grid.executors.base import Engine
from cofima.experiment.grid.executors.local import Local, devices
from cofima.store.config import Config


def make(name: str, out: Path, jobs: int | None, address: str | None, cells: Sequence[Config]) -> Engine:
    """Return an engine by its name; nothing is started yet, but what is missing is said."""
    if name == "ray":
        from cofima.experiment.grid.executors.ray import OnRay

        return OnRay(address, jobs)
    if name == "slurm":
        from cofima.experiment.grid.executors.slurm import OnSlurm

        return OnSlurm(out, address, jobs)
    if address is not None:
        raise CofimaError(f"--address {address}: is for --engine ray or slurm")
    free = all(cell.device == "auto" for cell in cells)  # who names a device has chosen
    gpus = devices() if free else []
    return Local(jobs or len(gpus) or os.cpu_count() or 1, gpus)
