"""Schema of the state that a method keeps between tasks, and operations on states by schema alone.

:meth:`Method.state` returns a flat dict of tensors. Each method declares the meaning of its entries, so that
classes can be removed and models merged by code that knows nothing else about the method.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from cofima.core.errors import CofimaError

if TYPE_CHECKING:
    from cofima.methods.base import Method

Pool = Callable[[Sequence[Mapping[str, Tensor]]], dict[str, Tensor]]
_BLOCK = re.compile(r"head\.blocks\.(\d+)\.")


@dataclass(frozen=True)
class Entry:
    """Declaration of one entry of a state, or of a group of entries with a common prefix.

    Attributes:
        name: Name of the entry; a name ending in a dot (``fisher.``) declares all entries with this prefix.
        axis: Meaning of the rows. ``class``: one row per class, along ``dim``. ``weight``: the name after the
            prefix is that of a parameter of the network, where ``head.blocks.N`` has one row per class of
            block N. None: not related to classes.
        dim: Dimension indexed by class, for ``class``.
        lengths: Name of an entry with one integer per class: the number of rows that each class has in this
            entry, class after class along dimension 0. Without it, each class has one row. In a group, the
            name after the prefix.
        ragged: In a group with ``lengths``, the name after the prefix of the entry with these rows; all
            other entries of the group have one row per class.
        merge: Rule for merging the entries of several models. ``average``: as the weights are averaged.
            ``sum``: added. ``pool``: by the function ``pool``, per class. ``last``: taken from the last
            model. ``refuse``: not possible; the merged model continues as another method, without the
            entry. Entries with one row per class are merged row by row, and a class that only one model
            has keeps its row.
        pool: Function from the rows of one class in each model that has it to the merged row. Rows are
            mappings by the name after the prefix (the whole name for a single entry); a ``ragged`` entry
            may have any number of rows.
        same_start: True if it can only be merged among models that started from the same weights.
        predicts: Description of a part, besides backbone and linear head, that predictions depend on
            (prompts); empty if they do not depend on this entry.
        inseparable: Why no class can be removed from it; empty if a class can be removed.
        keeps_removed: Description of the traces of a removed class in it; empty if there are none.
    """

    name: str
    axis: Literal["class", "weight"] | None = None
    dim: int = 0
    lengths: str = ""
    ragged: str = ""
    merge: Literal["average", "sum", "pool", "last", "refuse"] = "refuse"
    pool: Pool | None = None
    same_start: bool = False
    predicts: str = ""
    inseparable: str = ""
    keeps_removed: str = ""

    def __post_init__(self) -> None:
        if (self.merge == "pool") != (self.pool is not None) or (self.pool and self.axis != "class"):
            raise ValueError(f"{self.name}: merge='pool' needs a function, and axis='class'")
        if self.axis == "weight" and not self.name.endswith("."):
            raise ValueError(f"{self.name}: axis='weight' declares a group; end its name in a dot")
        if self.dim and self.axis != "class":
            raise ValueError(f"{self.name}: dim is that of axis='class'")
        if self.lengths and (self.axis != "class" or self.dim):
            raise ValueError(f"{self.name}: lengths are those of axis='class', along dimension 0")
        if bool(self.ragged) != bool(self.lengths and self.name.endswith(".")):
            raise ValueError(f"{self.name}: ragged names the entry of a group that has the lengths")
        if self.lengths and self.merge not in (("pool", "refuse") if self.ragged else ("refuse",)):
            raise ValueError(f"{self.name}: with lengths, merge='pool' in one group with them, or 'refuse'")

    def covers(self, key: str) -> bool:
        """Return True if this declaration covers the entry ``key``."""
        return key.startswith(self.name) if self.name.endswith(".") else key == self.name

    def rest(self, key: str) -> str:
        """Return the name of an entry after the prefix of its group."""
        return key.removeprefix(self.name) or key

    def lengths_of(self, key: str) -> str | None:
        """Return the name of the entry with the number of rows per class; None if each class has one."""
        if not self.lengths or self.rest(key) != (self.ragged or key):
            return None
        return f"{self.name}{self.lengths}" if self.ragged else self.lengths

    def rows(self, key: str, sizes: Sequence[int]) -> int | None:
        """Return the number of rows that an entry must have, given the classes per block; None for any."""
        if self.axis == "class":
            return sum(sizes)
        block = self.head_block(key)
        return None if block is None else dict(enumerate(sizes)).get(block[0], 0)

    def head_block(self, key: str) -> tuple[int, str] | None:
        """Return the head block that an entry belongs to and the parameter's name in it, or None."""
        found = _BLOCK.match(self.rest(key)) if self.axis == "weight" else None
        return None if found is None else (int(found[1]), self.rest(key)[found.end() :])

    def in_block(self, block: int, name: str) -> str:
        """Return the name of the entry for a parameter of a head block."""
        return f"{self.name}head.blocks.{block}.{name}"


def declared(kind: "type[Method]", keys: Iterable[str]) -> dict[str, Entry]:
    """Return the declaration of each entry of a method's state; raise if an entry has none."""
    found: dict[str, Entry] = {}
    for key in keys:
        mine = [entry for entry in kind.state_schema if entry.covers(key)]
        if len(mine) != 1:
            how = "twice in" if mine else "not in"
            raise CofimaError(
                f"{kind.label} keeps '{key}', which is {how} the state_schema of {kind.__name__}: what its "
                "rows are is not known, so no class can be taken out and no model merged. Declare it there, "
                f"for example Entry('{key}', axis='class') if it has one row a class"
            )
        found[key] = mine[0]
    return found


def check(kind: "type[Method]", state: Mapping[str, Tensor], sizes: Sequence[int]) -> dict[str, Entry]:
    """Return the declarations of a state; raise if a shape does not match the classes per block."""
    entries = declared(kind, state)
    for key, entry in entries.items():
        rows, shape = entry.rows(key, sizes), list(state[key].shape)
        if lengths := entry.lengths_of(key):
            _check_lengths(kind, key, state[key], lengths, state.get(lengths), sum(sizes))
        elif rows is not None and shape[entry.dim : entry.dim + 1] != [rows]:
            raise CofimaError(
                f"{kind.label} keeps '{key}' of shape {shape}: the state_schema of {kind.__name__} says that "
                f"dimension {entry.dim} has one row a class, which are {rows}. Correct it there"
            )
    return entries


def _check_lengths(
    kind: "type[Method]", key: str, value: Tensor, name: str, lengths: Tensor | None, classes: int
) -> None:
    """Raise if the rows of an entry do not match the counts in its ``lengths`` entry."""
    if lengths is None:
        found = "is not there"
    elif lengths.is_floating_point() or lengths.shape != (classes,) or bool((lengths < 0).any()):
        found = f"is {lengths.dtype} of shape {list(lengths.shape)}"
    elif value.dim() == 0 or len(value) != int(lengths.sum()):
        found = f"counts {int(lengths.sum())}"
    else:
        return
    raise CofimaError(
        f"{kind.label} keeps '{key}' of shape {list(value.shape)}, whose rows '{name}' must count with one "
        f"whole number for each of {classes} classes, and that {found}. Correct one of the two"
    )


def remove_class(
    kind: "type[Method]", state: Mapping[str, Tensor], sizes: Sequence[int], label: int
) -> dict[str, Tensor]:
    """Return a method's state without a class; ``sizes`` are the numbers of classes per head block.

    Sums over all images still include those of the class: see :func:`remains_of_removed`.
    """
    entries = check(kind, state, sizes)
    for entry in entries.values():
        if entry.inseparable:
            raise CofimaError(f"{kind.label} {entry.inseparable}")
    block, row = place_of(label, sizes)
    kept = {}
    for key, value in state.items():
        entry = entries[key]
        if lengths := entry.lengths_of(key):
            parts = torch.split(value, state[lengths].tolist())
            value = torch.cat([*parts[:label], *parts[label + 1 :]]) if len(parts) > 1 else value[:0]
        elif entry.axis == "class":
            value = drop_row(value, label, entry.dim)
        elif entry.axis == "weight" and entry.rest(key).startswith(f"head.blocks.{block}."):
            value = drop_row(value, row)
        kept[key] = value
    return kept


def remains_of_removed(kind: "type[Method]", state: Mapping[str, Tensor]) -> list[str]:
    """Return descriptions of the traces that a removed class leaves in a state."""
    return list(dict.fromkeys(e.keeps_removed for e in declared(kind, state).values() if e.keeps_removed))


def place_of(label: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the head block that contains a class, and the row of the class in it."""
    for block, size in enumerate(sizes):
        if label < size:
            return block, label
        label -= size
    raise IndexError(f"there is no class {label + sum(sizes)} among {sum(sizes)}")


def drop_row(values: Tensor, row: int, dim: int = 0) -> Tensor:
    """Return a tensor without one row along a dimension."""
    after = values.shape[dim] - row - 1
    return torch.cat([values.narrow(dim, 0, row), values.narrow(dim, row + 1, after)], dim)


def tagged(tag: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the prefix ``tag.``, as a group of a state."""
    return {f"{tag}.{key}": value for key, value in weights.items()}


def untagged(tag: str, state: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
    """Return the group of a state under the prefix ``tag.``, with the prefix removed."""
    group = f"{tag}."
    return {
        key.removeprefix(group): value if device is None else value.to(device)
        for key, value in state.items()
        if key.startswith(group)
    }
