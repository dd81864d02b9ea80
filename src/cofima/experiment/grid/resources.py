"""Resources of a grid's cell; imports no torch."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class Resources(BaseModel):
    """Resources of one cell, a recipe's key ``resources``; they never change what it computes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    cpus: Annotated[int, Field(ge=1)] | None = None
    """Cores and threads; by default 1 on a cluster, and an equal share of the cores on one machine."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs; a fraction such as 0.5 lets two cells share one (Ray only)."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory to reserve; by default none."""
    slurm: dict[str, Any] = Field(default_factory=dict)
    """Further parameters of submitit: ``{timeout_min: 600, slurm_partition: gpu}``."""
