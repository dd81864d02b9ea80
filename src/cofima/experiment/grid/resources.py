"""Resources of a grid cell; imports no torch."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class Resources(BaseModel):
    """Resources of one cell, a recipe's key ``resources``; they do not affect its result."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    cpus: Annotated[int, Field(ge=1)] | None = None
    """Cores and threads; by default one on a cluster, and an equal share of all cores on a single machine."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs; a fraction such as 0.5 lets two cells share one (Ray only)."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory to reserve; none by default."""
    slurm: dict[str, Any] = Field(default_factory=dict)
    """Additional parameters of submitit: ``{timeout_min: 600, slurm_partition: gpu}``."""
