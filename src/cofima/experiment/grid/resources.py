"""What a cell of a grid may use of a machine; it changes where a cell runs, never what it computes."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cofima.core.errors import problems


class Resources(BaseModel):
    """What one cell needs: a recipe's key ``resources``, also within ``per_backbone`` and the like."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    cpus: Annotated[int, Field(ge=1)] | None = None
    """Cores, and threads; if not given, 1 on a cluster, and an equal share of the cores on one machine."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs; a share such as 0.5 lets two cells use one (Ray only)."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory that must be free; not asked for, if not given."""
    slurm: dict[str, Any] = Field(default_factory=dict)
    """More of what submitit asks Slurm for, under its names: ``{timeout_min: 600, slurm_partition: gpu}``."""


def check_resources(values: Any, where: str) -> Resources:
    """Validate a recipe's ``resources``; the error lists every problem."""
    if not isinstance(values, Mapping):
        raise problems(where, [f"resources: expected keys and values, found {values!r}"])
    try:
        return Resources.model_validate(values)
    except ValidationError as error:
        found = [f"resources.{'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors()]
        raise problems(where, found) from error
