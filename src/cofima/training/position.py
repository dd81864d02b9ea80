"""Where a training is: everything that a step changes, as tensors and plain values."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

SCHEDULE = ("last_epoch", "_step_count", "_last_lr")  # the rest is made anew from the options


@dataclass
class Position:
    """A training between two of its steps.

    What depends on the seed and the place alone (the order of the images) is not part of it.
    """

    net: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    augment: torch.Generator | None = None
    losses: Tensor | None = None

    def tensors(self, *, complete: bool) -> dict[str, Tensor]:
        """Return the tensors; a complete training needs its optimizer no more."""
        found = {f"net.{key}": value for key, value in self.net.state_dict().items()}
        found["chance"] = torch.get_rng_state()
        if (device := self._device()).type == "cuda":
            found["chance_cuda"] = torch.cuda.get_rng_state(device)
        if complete:
            return found
        assert self.augment is not None
        assert self.losses is not None
        found |= {"augment": self.augment.get_state(), "losses": self.losses}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            found |= {f"optimizer.{index}.{name}": value for name, value in tensors.items()}
        return found

    def said(self) -> dict[str, Any]:
        """Return the rest, which is plain."""
        schedule, optimizer = self.schedule.state_dict(), self.optimizer.state_dict()
        plain = [
            [index, name, value]
            for index, state in optimizer["state"].items()
            for name, value in state.items()
            if not isinstance(value, Tensor)
        ]
        return {
            "schedule": {key: schedule[key] for key in SCHEDULE},
            "groups": optimizer["param_groups"],
            "optimizer": plain,
        }

    def misfit(self, tensors: dict[str, Tensor]) -> str:
        """Return why tensors are not of this network, or nothing."""
        there = {key: value for key, value in tensors.items() if key.startswith("net.")}
        mine = {f"net.{key}": value for key, value in self.net.state_dict().items()}
        if odd := sorted(there.keys() ^ mine.keys()):
            return f"{len(odd)} tensors are missing or too many, the first is {odd[0]}"
        odd = [key for key, value in mine.items() if there[key].shape != value.shape]
        return f"{odd[0]} has another shape" if odd else ""

    def load(self, tensors: dict[str, Tensor], said: dict[str, Any]) -> None:
        """Put network, optimizer, schedule and chance back; see :meth:`misfit` first."""
        net = {k.removeprefix("net."): v for k, v in tensors.items() if k.startswith("net.")}
        self.net.load_state_dict(net)  # into the memory that is there: others hold it too
        torch.set_rng_state(tensors["chance"])
        if "chance_cuda" in tensors and (device := self._device()).type == "cuda":
            torch.cuda.set_rng_state(tensors["chance_cuda"], device)
        if said["complete"]:
            return
        self.schedule.load_state_dict(said["schedule"])
        self.optimizer.load_state_dict(
            {"state": self._optimizer(tensors, said), "param_groups": said["groups"]}
        )
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a schedule asks for this

    def begin(self, tensors: dict[str, Tensor]) -> None:
        """Put back what belongs to the epoch."""
        assert self.augment is not None
        assert self.losses is not None
        self.augment.set_state(tensors["augment"])
        self.losses.copy_(tensors["losses"])

    def _optimizer(self, tensors: dict[str, Tensor], said: dict[str, Any]) -> dict[int, dict[str, Any]]:
        state: dict[int, dict[str, Any]] = {}
        moved = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        for key, value in tensors.items():
            if key.startswith("optimizer."):
                _, number, name = key.split(".", 2)
                state.setdefault(int(number), {})[name] = _like(value, moved[int(number)])
        for number, name, value in said["optimizer"]:
            state.setdefault(number, {})[name] = value
        return state

    def _device(self) -> torch.device:
        return next((weight.device for weight in self.net.parameters()), torch.device("cpu"))


def _like(value: Tensor, weight: Tensor) -> Tensor:
    """Lay a copy out in memory as its weight is: arithmetic may round otherwise across two layouts."""
    if value.shape != weight.shape or not value.ndim:
        return value.clone()
    return torch.empty_like(weight, dtype=value.dtype).copy_(value)
