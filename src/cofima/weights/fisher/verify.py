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

_NOISE = 1.0  # in rounding errors of the largest gradients: below it, a gradient is really 0 (0.3 was seen)
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-8}  # well above rounding, well below a missing term
_SETTINGS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Verdict:
    """Parameters of a model whose rules agree with the reference, and those left to the reference."""

    structure: frozenset[Any]
    fast: frozenset[str] = frozenset()
    slow: frozenset[str] = frozenset()


_VERDICTS: WeakKeyDictionary[nn.Module, _Verdict] = WeakKeyDictionary()


def verified(
    model: nn.Module, images: Inputs, picks: Tensor, labels: Labels
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the parameters whose rules agree with the reference on two ``images``, and the others.

    A rule cannot see everything: a second use of a weight in code that bypasses torch functions, samples
    that do not lie along the first dimension, samples that influence each other. Each of these shows up as a
    difference from the reference, or as more than one edge into the parameter in autograd's graph; such a
    parameter is left to the reference. If both results are pure rounding error, they agree: the bias of
    attention keys affects no prediction, and must not force the slow implementation. Two samples are needed,
    since a single one cannot be influenced by others. A parameter that these samples do not reach is in
    neither set.

    The way a model uses its parameters does not depend on their values, so each is compared once per
    process. It is compared again only if something else about the model changes, or as long as its gradient
    is 0, as in a branch initialized to 0, for which any rule would pass.
    """
    structure, names = _structure(model, images), {name for name, _ in model.named_parameters()}
    known = _VERDICTS.get(model, _Verdict(structure))
    if not known.structure <= structure:  # a known module changed; added ones (rows of a head) are fine
        known = _Verdict(structure)
    if names and names <= known.fast | known.slow:
        return known.fast, known.slow
    edges = _edges(model, take(images, slice(1), len(picks)))
    if any(edges[name] > 1 for name in known.fast):  # a new module uses known parameters as well
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
    """Return zeros for summing the squares of a parameter.

    In at least single precision, since squares of half-precision gradients underflow.
    """
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    return torch.zeros(p.shape, dtype=dtype, device=p.device)


def _structure(model: nn.Module, images: Inputs) -> frozenset[Any]:
    """Return everything that determines how a model uses its parameters, as one set of parts."""
    parts: set[Any] = {("images", *((t.shape[1:], t.dtype, t.device) for t in tensors(images)))}
    for name, module in model.named_modules(remove_duplicate=False):
        settings = {key: value for key, value in vars(module).items() if isinstance(value, _SETTINGS)}
        settings.pop("training")  # the Fisher is computed in eval mode regardless of this flag
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

    The comparison alone would miss a second use whose gradient happens to be 0 on these two samples.
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
