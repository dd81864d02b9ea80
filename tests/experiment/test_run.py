"""The learning path: early stopping, and the announced work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from cofima.core.progress import Progress
from cofima.experiment.run import EarlyStop


def test_stopping_is_decided_on_held_out_images(tiny) -> None:
    """The loss is that of the task's held-out images over its own classes, and no training image is read."""
    stream = tiny.stream((2, 2), per_class=6)
    model = tiny.model(tiny.config("seq_ft", train={"epochs": 1}), stream)
    for task in stream:
        model.method.learn(task)
    pixels, labels = task.test.batch(torch.arange(len(task.test)))
    expected = cross_entropy(model.logits(pixels)[:, 2:], labels - 2)
    stop = EarlyStop(model.method, task, patience=1)
    assert not stop()
    assert stop.best == pytest.approx(float(expected), abs=1e-5)
    assert stop()  # no smaller loss a second time


class Meter(Progress):
    """The sums of announced and of done work."""

    def __init__(self) -> None:
        self.expected = self.done = 0.0

    def expect(self, work: float) -> None:
        """Add announced work."""
        self.expected += work

    def worked(self, work: float) -> None:
        """Add done work."""
        self.done += work


@pytest.mark.parametrize("method", ["seq_ft", "slca", "cofima", "ewc", "prototype"])
def test_the_announced_work_is_what_is_done(method: str, tiny: Any, tmp_path: Path) -> None:
    meter, stream = Meter(), tiny.stream((2, 2, 2), per_class=8)
    tiny.run(tmp_path, tiny.config(method, train={"epochs": 2}), stream, meter)
    assert meter.expected > 0
    assert 0.8 < meter.done / meter.expected < 1.2
