"""Context manager that restores a model and torch's random number generators.

The Fisher information is a measurement: training that continues after it must be bit-identical to training
without it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def preserved_state(model: nn.Module, training: bool = False) -> Iterator[None]:
    """Freeze ``model`` in eval (or train) mode, in full precision; restore everything about it on exit."""
    modules = [(module, module.training) for module in model.modules()]
    params = [(p, p.requires_grad, p._backward_hooks) for p in model.parameters()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    with ExitStack() as stack:
        # dropout in training mode consumes random numbers; the training that follows must not notice
        cuda = [d.index or 0 for d in devices if d.type == "cuda"]
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.callback(_restore, modules, params, buffers)
        for kind in {d.type for d in devices} | {"cpu"}:
            stack.enter_context(torch.autocast(kind, enabled=False))  # in half precision, squares underflow
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for module, _ in modules:
            module.training = training  # not train(): an override of it may change the weights
        for p, _, _ in params:
            p._backward_hooks = None  # a user's hook may mask gradients; the Fisher needs the true ones
            p.requires_grad_(False)
        yield


def _restore(
    modules: list[tuple[nn.Module, bool]],
    params: list[tuple[nn.Parameter, bool, Any]],
    buffers: list[tuple[Tensor, Tensor]],
) -> None:
    for module, flag in modules:
        module.training = flag
    for p, required, hooks in params:
        p.requires_grad_(required)
        p._backward_hooks = hooks
    for buffer, before in buffers:
        if not torch.equal(buffer, before):
            buffer.copy_(before)
