"""Fixtures of the tests of methods."""

import pytest

from cofima.methods.components.aligned import Aligned
from cofima.weights import snapshot


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list:
    """Return a list that fills with the backbones right before and right after each training."""
    found: list = []
    train = Aligned.train

    def spied(self, task, hooks):
        before = snapshot(self.net.backbone)
        train(self, task, hooks)
        found.append((before, snapshot(self.net.backbone)))

    monkeypatch.setattr(Aligned, "train", spied)
    return found
