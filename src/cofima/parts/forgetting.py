"""A class taken out of everything that is kept: the rows that belong to it, and nothing else."""

import torch
from torch import Tensor

from cofima.errors import CofimaError

ROWS = {"raw_head.weight", "raw_head.bias", "gaussians.means", "gaussians.packed", "gaussians.counts"}


def without_row(values: Tensor, row: int) -> Tensor:
    """Return a tensor without one of its rows."""
    return torch.cat([values[:row], values[row + 1 :]])


def without_class(state: dict[str, Tensor], label: int, block: int, row: int) -> dict[str, Tensor]:
    """Return a method's state without a class, which is ``row`` of the head's ``block``.

    RanPAC's other sum keeps the class's images, as images of no class: they cannot be told apart in it.
    """
    if any(key.startswith("memory.") for key in state):
        raise CofimaError("this method keeps images of its classes together, and cannot forget one class")
    kept = {key: _without(key, value, label, f"head.blocks.{block}.", row) for key, value in state.items()}
    if "gaussians.shrunk" in kept:
        shrunk = kept["gaussians.shrunk"]
        kept["gaussians.shrunk"] = shrunk[shrunk != label] - (shrunk[shrunk != label] > label).long()
    return kept


def _without(key: str, value: Tensor, label: int, block: str, row: int) -> Tensor:
    if key in ROWS:
        return without_row(value, label)
    if key.partition(".")[2].startswith(block):  # Fisher information, and where EWC is centred
        return without_row(value, row)
    return without_row(value.T, label).T.contiguous() if key == "cross" else value
