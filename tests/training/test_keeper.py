"""When a training is written down: often enough, and never for more than its share of the time."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cofima.training import keeper
from cofima.training.keeper import Keeper

SIZE = 400_000_000  # bytes: four seconds at the speed that a disk is taken to have


class Learner:
    """A method that only counts."""

    def __init__(self) -> None:
        self.seconds, self.notes = 0.0, list[str]()

    def midway(self) -> dict[str, torch.Tensor]:
        return {}

    def spent(self) -> dict[str, float]:
        return {}

    def add_spent(self, seconds: dict[str, float]) -> None:
        self.seconds += seconds["inflight"]

    def note(self, text: str) -> None:
        self.notes.append(text)


def simulate(
    monkeypatch: pytest.MonkeyPatch, cost: float, hours: float, fault: Exception | None = None
) -> tuple[list[float], Learner, float]:
    """Train for hours in steps of a second; return the writings, the learner, the largest share."""
    now, written = [0.0], list[float]()

    def write(*_: Any) -> None:
        now[0] += cost
        written.append(now[0])
        if fault is not None:
            raise fault

    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(keeper.sealed, "write", write)
    state = {"weight": torch.empty(SIZE // 4, device="meta")}
    where: Any = SimpleNamespace(tensors=lambda complete: state, said=dict)
    learner, mine = Learner(), Keeper(Path(), {"with": {}}, lambda: "")
    mine.task(learner, 0)
    mine._plan(SIZE)
    most = 0.0
    while now[0] < hours * 3600:
        now[0] += 1
        if mine.due():
            mine.write(where, {"complete": False})
        most = max(most, learner.seconds / now[0])
    return written, learner, most


@pytest.mark.parametrize("cost", [0.01, 1.0, 4.0])
def test_it_never_takes_more_than_its_share(cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    written, learner, most = simulate(monkeypatch, cost, hours=2)
    assert most <= keeper.SHARE
    assert learner.seconds == pytest.approx(cost * len(written))
    gaps = [after - before for before, after in pairwise(written)]
    assert min(gaps) >= keeper.EVERY
    assert max(gaps) <= max(keeper.EVERY, cost / keeper.SHARE) + cost + 1, "and not less often than that"


def test_a_disk_that_is_slower_than_expected_is_paid_back(monkeypatch: pytest.MonkeyPatch) -> None:
    written, learner, _ = simulate(monkeypatch, cost=40.0, hours=3)
    assert len(written) > 1
    assert written[1] >= 2 * 40 / keeper.SHARE
    assert learner.seconds / (3 * 3600) <= keeper.SHARE


def test_what_cannot_be_written_is_said_once_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = OSError(28, "No space left on device")
    written, learner, most = simulate(monkeypatch, cost=0.1, hours=1, fault=fault)
    assert len(written) > 10
    assert len(learner.notes) == 1
    assert "No space left on device" in learner.notes[0]
    assert most <= keeper.SHARE
