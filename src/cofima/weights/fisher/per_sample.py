"""Squared per-sample gradients out of one backward pass over the whole batch.

Autograd sums a weight's gradient over samples before anybody can square it. But the gradient at the output
of the function that used the weight is still separate for each sample, and together with the function's
input it determines the per-sample gradient: for ``y = W x`` it is ``grad_y x^T``. So the forward pass is
watched, a hook is put on each such output, and the rules turn its gradient into squares.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cofima.weights.fisher.inputs import Inputs
from cofima.weights.fisher.labels import Labels
from cofima.weights.fisher.rules import RESHAPES, RULES, Square, rows_for_all
from cofima.weights.ops import Weights


class Taps(TorchFunctionMode):
    """Hooks on the gradient of every torch function in a forward pass that receives a parameter.

    Parameters are recognized where torch functions receive them, not by the module that owns them, so that
    subclasses, activations fused into a norm, and functional calls are all seen as what they compute. All
    parameters stay frozen: autograd then spends nothing on summed weight gradients, which nobody needs.
    """

    def __init__(self, names: dict[int, str], samples: int, totals: Weights) -> None:
        super().__init__()
        self.names = dict(names)  # id of a parameter, or of a reshaped one, to its name
        self.wanted: Set[str] = set()
        self.samples = samples
        self.totals = totals
        self.uses: Counter[str] = Counter()
        self.ruled: Counter[str] = Counter()
        self.leaves: list[Tensor] = []
        self.rows: dict[int, Tensor] = {}  # of tables, some rows of which stand for them
        self._kept: list[Tensor] = []  # an id means something only while its tensor lives

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        met = [t for t in _tensors((*args, *kwargs.values())) if id(t) in self.names]
        if not met or not any(t.is_floating_point() and id(t) not in self.names for t in _tensors([out])):
            return out  # no parameter involved, or only asked for its shape
        if len(met) == 1 and isinstance(out, Tensor) and self._stands_for(out, func, met[0], args, kwargs):
            self.names[id(out)] = self.names[id(met[0])]
            self._kept.append(out)
            return out
        self.uses.update(self.names[id(t)] for t in met)
        parts = self._parts(func, args, kwargs)
        return self._tap(out, parts) if parts else out

    def _stands_for(self, out: Tensor, func: Any, met: Tensor, args: Any, kwargs: Any) -> bool:
        """Return True if the result is the parameter in another shape, or rows of it for all samples."""
        if id(met) in self.rows:
            return False
        if func is functional.embedding and len(args) > 1 and met is args[1]:
            rows = rows_for_all(self.samples, args[0], met, kwargs.get("padding_idx", (*args, None)[2]))
            if rows is not None:
                self.rows[id(out)] = rows
            return rows is not None
        return func in RESHAPES

    def _parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Square]]:
        rule = RULES.get(func)
        if rule is None or not torch.is_grad_enabled():
            return []
        try:
            parts = rule(self.samples, *args, **kwargs)
        except TypeError:  # an argument that the rule does not know, such as ``alpha``
            return []
        known = [(p, square) for p, square in parts if p is not None and id(p) in self.names]
        self.ruled.update(self.names[id(p)] for p, _ in known)
        return [
            (self.names[id(p)], partial(_reshaped, square, p.shape, self.rows.get(id(p))))
            for p, square in known
        ]

    def _tap(self, out: Tensor, parts: list[tuple[str, Square]]) -> Tensor:
        if not out.requires_grad:
            # The first layer: start the graph behind it, so that no gradient of the images is computed.
            self.leaves.append(out.detach().requires_grad_())
            out = self.leaves[-1].clone()  # a leaf could not be changed in place
        out.register_hook(partial(self._add, parts))  # type: ignore[no-untyped-call]
        return out

    def _add(self, parts: list[tuple[str, Square]], grad: Tensor) -> None:
        for name, square in parts:
            if name in self.wanted:
                square(grad, self.totals[name])

    def understood(self) -> set[str]:
        """Return the parameters that were used exactly once, and by a rule.

        With two uses the per-sample gradient is a sum of two terms, whose square is not the sum of squares.
        """
        return {name for name, count in self.uses.items() if count == self.ruled[name] == 1}


def _reshaped(square: Square, shape: torch.Size, rows: Tensor | None, grad: Tensor, total: Tensor) -> None:
    if rows is None:
        square(grad, total.view(shape))
        return
    part = total.new_zeros(shape)
    square(grad, part)
    total.index_add_(0, rows, part.view(len(rows), -1))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def add_batch(
    model: nn.Module, names: Set[str], images: Inputs, picks: Tensor, labels: Labels, totals: Weights
) -> tuple[set[str], set[str]]:
    """Add the squares of one batch for ``names``; all parameters must be frozen.

    Return the parameters that were done, and those that the model used but that were not: of these
    nothing was added.
    """
    known = {id(p): name for name, p in model.named_parameters()}
    taps = Taps(known, len(picks), totals)
    with taps:
        logits = labels.checked(model(images), picks)
    taps.wanted = done = taps.understood() & names
    if done and taps.leaves and logits.requires_grad:
        for direction, more in labels.directions(logits.detach(), picks):
            torch.autograd.grad(logits, taps.leaves, direction, retain_graph=more, allow_unused=True)
    return done, set(taps.uses) - done
