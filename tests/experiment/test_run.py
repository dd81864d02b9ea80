"""The stopping rule of the one learning path."""

import pytest
import torch
from torch.nn.functional import cross_entropy

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
