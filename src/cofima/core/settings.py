"""Roles of settings whose value does not decide a result, marked on the configuration's own fields.

A setting without a role counts everywhere: a run is continued with the same value only, another value makes
another cell of a grid, and runs that differ in it do not share a row of a table. ``Annotated[str, MACHINE]``
says where a setting does not count; nothing else in the package lists such settings.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class Role:
    """The uses in which the value of a setting counts.

    Attributes:
        resumed: A run is continued with the same value only.
        named: Another value is another cell of a grid, in a folder of another name.
        compared: Runs with other values do not share a row, and do not follow one protocol.
    """

    resumed: bool = True
    named: bool = True
    compared: bool = True


MACHINE = Role(resumed=False, named=False, compared=False)
"""Machine-specific settings: the result is the same everywhere."""

SOURCE = Role(resumed=False, compared=False)
"""Names files whose content the run records as a hash. The hash is compared, with other runs and when a run
is continued; it is not known before the files are read, so cells of a grid are told apart by the name."""

RECORDED = Role(compared=False)
"""Takes effect once, at the start, and the run records the effect: the hash of images or weights, or how
images are prepared. That is compared instead, whatever it was asked for by."""

REPEAT = Role(compared=False)
"""Runs that differ in nothing else are repetitions: a row of a table is the mean over them."""


def uncounted(model: type[BaseModel], where: str) -> frozenset[str]:
    """Return the dotted names of settings that do not count where an attribute of :class:`Role` says."""
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
