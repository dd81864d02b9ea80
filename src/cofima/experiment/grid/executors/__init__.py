"""Executors of grid cells: this machine, a Ray cluster, or Slurm."""

import os
from collections.abc import Sequence
from pathlib import Path

from cofima.core.errors import CofimaError
from cofima.experiment.grid.executors.base import Executor
from cofima.experiment.grid.executors.local import LocalExecutor, devices
from cofima.store.config import Config


def make(name: str, out: Path, jobs: int | None, address: str | None, cells: Sequence[Config]) -> Executor:
    """Return an executor by name; raise if its package or its cluster is missing."""
    if name == "ray":
        from cofima.experiment.grid.executors.ray import RayExecutor

        return RayExecutor(address, jobs)
    if name == "slurm":
        from cofima.experiment.grid.executors.slurm import SlurmExecutor

        return SlurmExecutor(out, address, jobs)
    if address is not None:
        raise CofimaError(f"--address {address}: is for --executor ray or slurm")
    # do not assign GPUs if a cell names its device
    gpus = devices() if all(cell.device == "auto" for cell in cells) else []
    return LocalExecutor(jobs or len(gpus) or os.cpu_count() or 1, gpus)
