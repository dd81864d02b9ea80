"""Roles of settings that do not affect results, annotated on the fields of the configuration.

A setting without a role matters everywhere: a run can only be resumed with the same value, another value
makes another cell of a grid, and runs with different values do not share a row of a table. A role such as
``Annotated[str, MACHINE]`` says where a setting does not matter; there is no other list of such settings.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class Role:
    """Uses in which the value of a setting matters.

    Attributes:
        resumed: A run can only be resumed with the same value.
        named: Another value is another cell of a grid, in a folder of another name.
        compared: Runs with different values do not share a row of a table, nor a protocol.
    """

    resumed: bool = True
    named: bool = True
    compared: bool = True


MACHINE = Role(resumed=False, named=False, compared=False)
"""Machine-specific setting, which does not affect the result."""

SOURCE = Role(resumed=False, compared=False)
"""Name of files whose content the run records as a hash. The hash is compared, both with other runs and on
resuming; it is not known before the files are read, so the cells of a grid are distinguished by the name."""

RECORDED = Role(compared=False)
"""Setting that takes effect once, at the start, with an effect that the run records: the hash of images or
weights, or the preprocessing. The record is compared instead of the setting."""

REPEAT = Role(compared=False)
"""Setting in which repetitions differ, such as the seed: a row of a table is the mean over them."""


def uncounted(model: type[BaseModel], where: str) -> frozenset[str]:
    """Return the dotted names of settings that do not matter for a use, an attribute of :class:`Role`."""
    found: set[str] = set()
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= {f"{name}.{inner}" for inner in uncounted(field.annotation, where)}
        elif any(isinstance(role, Role) and not getattr(role, where) for role in field.metadata):
            found.add(name)
    return frozenset(found)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as dotted names with JSON values: ``{"train.lr": "0.01"}``."""
    leaves: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return leaves
