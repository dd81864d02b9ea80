"""Squared per-sample gradients from one backward pass over a whole batch.

Autograd sums a weight's gradient over samples before it can be squared. But the gradient at the output of
the function that uses the weight is still separate per sample, and together with the function's input it
determines the per-sample gradient: for ``y = W x`` it is ``grad_y x^T``. So the forward pass is intercepted,
a hook is registered on each such output, and the rules turn its gradient into squares.
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
    """Gradient hooks on the output of every torch function in a forward pass that takes a parameter.

    Parameters are recognized as arguments of torch functions, not by the module that owns them, so that
    module subclasses, activations fused into a norm, and functional calls are all covered. All parameters
    stay frozen, so that autograd does not compute the summed weight gradients, which are not needed.
    """

    def __init__(self, names: dict[int, str], samples: int, totals: Weights) -> None:
        super().__init__()
        self.names = dict(names)  # id of a parameter, or of a reshaped view of it, to its name
        self.wanted: Set[str] = set()
        self.samples = samples
        self.totals = totals
        self.uses: Counter[str] = Counter()
        self.ruled: Counter[str] = Counter()
        self.leaves: list[Tensor] = []
        self.rows: dict[int, Tensor] = {}  # id of rows taken from an embedding table, to their indices
        self._kept: list[Tensor] = []  # keeps tensors alive, since an id may be reused once its owner is gone

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        met = [t for t in _tensors((*args, *kwargs.values())) if id(t) in self.names]
        if not met or not any(t.is_floating_point() and id(t) not in self.names for t in _tensors([out])):
            return out  # no parameter involved, or no new floating-point tensor (a query such as size())
        if len(met) == 1 and isinstance(out, Tensor) and self._stands_for(out, func, met[0], args, kwargs):
            self.names[id(out)] = self.names[id(met[0])]
            self._kept.append(out)
            return out
        self.uses.update(self.names[id(t)] for t in met)
        parts = self._parts(func, args, kwargs)
        return self._tap(out, parts) if parts else out

    def _stands_for(self, out: Tensor, func: Any, met: Tensor, args: Any, kwargs: Any) -> bool:
        """Return True if the result is the parameter reshaped, or rows of it shared by all samples."""
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
        if rule is None or not torch.is_grad_enabled():  # under no_grad, there is no gradient to hook
            return []
        try:
            parts = rule(self.samples, *args, **kwargs)
        except TypeError:  # an argument that the rule does not support, such as ``alpha``
            return []
        known = [(p, square) for p, square in parts if p is not None and id(p) in self.names]
        self.ruled.update(self.names[id(p)] for p, _ in known)
        return [
            (self.names[id(p)], partial(_reshaped, square, p.shape, self.rows.get(id(p))))
            for p, square in known
        ]

    def _tap(self, out: Tensor, parts: list[tuple[str, Square]]) -> Tensor:
        if not out.requires_grad:
            # First layer: start the graph at its output, so that no gradient at the images is computed.
            self.leaves.append(out.detach().requires_grad_())
            out = self.leaves[-1].clone()  # autograd forbids in-place operations on a leaf
        out.register_hook(partial(self._add, parts))  # type: ignore[no-untyped-call]
        return out

    def _add(self, parts: list[tuple[str, Square]], grad: Tensor) -> None:
        for name, square in parts:
            if name in self.wanted:
                square(grad, self.totals[name])

    def understood(self) -> set[str]:
        """Return the parameters that were used exactly once, in a call covered by a rule.

        With two uses, the per-sample gradient is a sum of two terms, whose square is not the sum of squares.
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
    """Add the squared per-sample gradients of one batch for ``names``; all parameters must be frozen.

    Returns:
        The parameters that were added, and those that the model used but that were not: for these,
        ``totals`` is unchanged.
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
