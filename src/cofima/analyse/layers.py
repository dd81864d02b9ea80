"""Weights by layer: what stands before the name of a single weight."""

import re
from collections.abc import Iterable

NUMBERED = re.compile(r"(?:[A-Za-z_]\w*\.\d+\.)+")


def layer_of(key: str) -> str:
    """Return the block that a weight belongs to: ``blocks.3``, ``layer1.0``, ``patch_embed``."""
    found = NUMBERED.match(key)
    return found[0].removesuffix(".") if found else key.partition(".")[0]


def by_layer(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of weights by their layer, in the order of the network."""
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(layer_of(key), []).append(key)
    return found
