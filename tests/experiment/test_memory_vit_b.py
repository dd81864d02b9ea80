"""How much memory CoFiMA needs for a ViT-B/16 at 224 pixels, counted in models: minutes, so marked slow.

A model is the weights of the backbone: 343 MB. Tensors held, as counted on a CPU with batches of 4:
a step of the first task 4.01, of the second 5.02; the merge 4.01; before a Fisher information is measured
2.01 to 3.01, and one more when it is; between tasks 2.01.
"""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cofima.data.sources.in_memory import blobs
from cofima.data.stream import Stream, from_groups
from cofima.methods import cofima as module
from cofima.methods.base import Method
from cofima.methods.cofima import CoFiMA
from cofima.models.registry import ALIASES

NAME = "vit_b16_in21k"
MODEL = 4 * ALIASES[NAME].parameters  # bytes of the weights
STATUS = Path("/proc/self/statm")


def held() -> float:
    """Return the bytes of every storage that a live tensor, or its gradient, holds, in models."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):  # isinstance would wake lazy stand-ins
            continue
        for tensor in (thing, thing.grad if thing.is_leaf else None):
            if tensor is not None and tensor.layout is torch.strided and not tensor.is_meta:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values()) / MODEL


class Resident(threading.Thread):
    """Look at the memory of the process many times a second, and keep the most of each phase, in models."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.phase, self.most, self.stop = "start", dict[str, float](), threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            pages = int(STATUS.read_text().split()[1])
            self.most[self.phase] = max(self.most.get(self.phase, 0.0), pages * 4096 / MODEL)
            time.sleep(0.01)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


def two_tasks(side: int) -> Stream:
    return from_groups(blobs(4, per_class=4, side=side, seed=0), [[0, 1], [2, 3]])


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.exists(), reason="the memory of the process is read from /proc")
def test_cofima_on_a_vit_b_holds_as_many_models_as_its_equations_need(
    tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = 224 * 10 // 9
    config = tiny.config(
        "cofima",
        NAME,
        train={"epochs": 1, "batch_size": 4, "lr": 0.01, "backbone_lr_scale": 0.01},
        options={"align": {"epochs": 1, "samples_per_class": 8}},
    )
    stream = two_tasks(side)
    nothing = held()
    model = tiny.model(config, stream)
    counted: dict[str, list[float]] = {"step": [], "merge": [], "fisher": [], "between": []}
    watch = Resident()

    step, average, fisher = Method.after_step, module.fisher_average, CoFiMA.trained_fisher

    def count(where: str) -> None:
        counted[where].append(held() - nothing)

    def measured(self: CoFiMA, task):
        count("fisher")
        with watch.during("fisher"):
            return fisher(self, task)

    monkeypatch.setattr(Method, "after_step", lambda self, batch: (count("step"), step(self, batch)))
    monkeypatch.setattr(module, "fisher_average", lambda *a, **k: (average(*a, **k), count("merge")))
    monkeypatch.setattr(CoFiMA, "trained_fisher", measured)
    watch.start()
    try:
        for task in stream:
            with watch.during(f"task {task.index + 1}"):
                model.method.learn(task)
            count("between")
    finally:
        watch.stop.set()
        watch.join()
    print("models held:", {where: [round(n, 2) for n in found] for where, found in counted.items()})
    print("resident, in models:", {phase: round(most, 2) for phase, most in watch.most.items()})
    first, second = counted["step"][:2], counted["step"][2:]
    spare = 0.1  # the head, Gaussians, a batch of images
    assert max(first) < 4 + spare  # weights, gradients, momentum, the weights before
    assert max(second) < 5 + spare  # and the Fisher information before
    assert max(counted["merge"]) < 4 + spare  # two sets of weights, two Fisher informations
    assert max(counted["fisher"]) < 3 + spare  # the network, the weights and the Fisher information before
    assert max(counted["between"]) < 2 + spare  # the network and its Fisher information
