"""Verification of the fast rules against the reference, on two samples of the actual model."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from cofima.weights.fisher.inputs import Inputs, take
from cofima.weights.fisher.labels import Labels
from cofima.weights.fisher.per_sample import add_batch
from cofima.weights.fisher.reference import add_each, require_grad
from cofima.weights.ops import Weights

_NOISE = 0.1  # of a rounding error of the largest gradients: below it, a gradient is 0 in truth
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-8}  # well above rounding, well below a missing term


def verified(
    model: nn.Module, images: Inputs, picks: Tensor, labels: Labels, totals: Weights
) -> tuple[set[str], set[str]]:
    """Add the squares of ``images`` one by one; return the parameters whose rules agree, and the others.

    A rule cannot see everything: a second use of a weight in code that torch functions do not pass, samples
    that do not lie along the first dimension, samples that influence each other. Each shows as a difference
    to the reference, or as more than one edge into the parameter in autograd's graph; such a parameter is
    left to the slow way. Where both ways give rounding errors alone, they agree: the bias of an attention's
    keys moves no prediction, and must not send every sample the slow way. Two samples are needed: with one,
    samples cannot influence each other. A parameter that these samples do not reach is in neither set.
    """
    names = set(totals)
    exact = {name: torch.zeros_like(total) for name, total in totals.items()}
    add_each(model, names, images, picks, labels, exact)
    fast = {name: torch.zeros_like(total) for name, total in totals.items()}
    done, used = add_batch(model, names, images, picks, labels, fast)
    edges = _edges(model, take(images, slice(1), len(picks)))
    for name, total in totals.items():
        total += exact[name]
    largest = max((float(value.mean()) for value in exact.values() if value.numel()), default=0.0)
    agree = {n for n in done if edges[n] <= 1 and _agree(fast[n], exact[n], largest)}
    return agree, (names & set(edges) | used) - agree


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
