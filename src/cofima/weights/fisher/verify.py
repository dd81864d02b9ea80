"""Verification of the fast rules against the reference, on two samples of the actual model."""

from collections import Counter
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cofima.weights.fisher.inputs import Inputs, take, tensors
from cofima.weights.fisher.labels import Labels
from cofima.weights.fisher.per_sample import add_batch
from cofima.weights.fisher.reference import add_each, require_grad

_NOISE = 1.0  # rounding errors of the largest gradients: below it, a gradient is 0 in truth (0.3 was seen)
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-8}  # well above rounding, well below a missing term
_SETTINGS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Verdict:
    """The parameters of a model whose rules were found to agree, and those that are left to the reference."""

    structure: frozenset[Any]
    fast: frozenset[str] = frozenset()
    slow: frozenset[str] = frozenset()


_VERDICTS: WeakKeyDictionary[nn.Module, _Verdict] = WeakKeyDictionary()


def verified(
    model: nn.Module, images: Inputs, picks: Tensor, labels: Labels
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the parameters whose rules agree with the reference on two ``images``, and the others.

    A rule cannot see everything: a second use of a weight in code that torch functions do not pass, samples
    that do not lie along the first dimension, samples that influence each other. Each shows as a difference
    to the reference, or as more than one edge into the parameter in autograd's graph; such a parameter is
    left to the slow way. Where both ways give rounding errors alone, they agree: the bias of an attention's
    keys moves no prediction, and must not send every sample the slow way. Two samples are needed: with one,
    samples cannot influence each other. A parameter that these samples do not reach is in neither set.

    How a model uses its parameters does not depend on their values, so that each is compared once in a
    process: again only if something else about the model changes, or while its gradient is 0, as that of a
    branch that starts at 0, which every rule would get right.
    """
    structure, names = _structure(model, images), {name for name, _ in model.named_parameters()}
    known = _VERDICTS.get(model, _Verdict(structure))
    if not known.structure <= structure:  # more than that new parts were added, such as rows of a head
        known = _Verdict(structure)
    if names and names <= known.fast | known.slow:
        return known.fast, known.slow
    edges = _edges(model, take(images, slice(1), len(picks)))
    if any(edges[name] > 1 for name in known.fast):  # a new part uses them as well
        known = _Verdict(structure)
    new = names - known.fast - known.slow
    exact, fast = ({n: zeros_for(p) for n, p in model.named_parameters() if n in new} for _ in range(2))
    add_each(model, new, images, picks, labels, exact)
    done, used = add_batch(model, new, images, picks, labels, fast)
    largest = max((float(value.mean()) for value in exact.values() if value.numel()), default=0.0)
    agree = {n for n in done if edges[n] <= 1 and _agree(fast[n], exact[n], largest)}
    slow = known.slow | (new & (set(edges) | used)) - agree
    reached = {n for n in agree if exact[n].any()}
    _VERDICTS[model] = _Verdict(structure, known.fast | reached, slow)
    return known.fast | agree, slow


def zeros_for(p: Tensor) -> Tensor:
    """Return where the squares of a parameter are summed.

    Squares of half-precision gradients underflow: sums are kept in at least single precision.
    """
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    return torch.zeros(p.shape, dtype=dtype, device=p.device)


def _structure(model: nn.Module, images: Inputs) -> frozenset[Any]:
    """Return all that may change how a model uses its parameters, in parts, one or more for each module."""
    parts: set[Any] = {("images", *((t.shape[1:], t.dtype, t.device) for t in tensors(images)))}
    for name, module in model.named_modules(remove_duplicate=False):
        settings = {key: value for key, value in vars(module).items() if isinstance(value, _SETTINGS)}
        settings.pop("training")  # measured in eval mode, whatever it is
        hooks = [vars(module).get("forward"), *module._forward_pre_hooks.values()]
        codes = [getattr(hook, "__code__", type(hook)) for hook in (*hooks, *module._forward_hooks.values())]
        parts.add((name, id(module), type(module), *settings.items(), *codes))
    return frozenset(parts | {(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)})


def _agree(fast: Tensor, exact: Tensor, largest: float) -> bool:
    noise = (_NOISE * torch.finfo(exact.dtype).eps) ** 2 * largest * exact.numel()
    if float(fast.sum()) <= noise and float(exact.sum()) <= noise:
        return True
    return bool((fast - exact).abs().sum() <= _TOLERANCE[exact.dtype] * exact.sum())


def _edges(model: nn.Module, image: Inputs) -> Counter[str]:
    """Count the edges into each parameter in the graph of one forward pass.

    The comparison alone could miss a second use whose gradient happens to be 0 on these two samples.
    """
    with require_grad(model, {name for name, _ in model.named_parameters()}) as params:
        names = {id(p): name for name, p in params.items()}
        found: Counter[str] = Counter()
        seen: set[Any] = set()
        queue: list[Any] = [model(image).grad_fn]
        while queue:
            for node, _ in getattr(queue.pop(), "next_functions", ()):
                if hasattr(node, "variable"):
                    found[names.get(id(node.variable), "")] += 1
                elif node is not None and node not in seen:
                    seen.add(node)
                    queue.append(node)
    return found
