"""One run in several processes: who takes which part of the work, and how the parts become one again.

``torchrun`` starts the processes and numbers them. All of them read the same configuration and images and
draw the same random numbers; each computes its own part of every batch, and what the parts come to is
summed or put together again, so that every process goes on from the same weights. A single process takes
all, and nothing here changes anything for it.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cofima.core import torchrun
from cofima.core.errors import CofimaError

T = TypeVar("T")

PATIENCE = timedelta(hours=2)  # for a process that still decodes images; a dead one ends the job at once


def world() -> int:
    """Return how many processes work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process among them; 0 writes."""
    return dist.get_rank() if world() > 1 else 0


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Let the processes that were started together find each other, and part when all have finished.

    After an error they do not wait for each other: who started them ends the others.
    """
    if torchrun.world_size() == 1 or dist.is_initialized():
        yield
        return
    from torch._C._distributed_c10d import PrefixStore  # some builds of torch come without
    from torch.distributed.rendezvous import rendezvous

    if device.type == "cuda":
        torch.cuda.set_device(device)
    found, number, count = next(rendezvous("env://", timeout=PATIENCE))
    # where torchrun starts the processes again, what the dead ones left in the store is not read
    fresh = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", found)
    how = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(how, store=fresh, rank=number, world_size=count, timeout=PATIENCE)
    yield
    total(torch.zeros(1))  # the last task is on disk before any process leaves
    dist.destroy_process_group()


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``stop`` of ``whole``: what this process takes of a batch, or of a set of images."""

    start: int
    stop: int
    whole: int
    shared: bool = True
    """Whether others take the other rows; a batch of fewer rows than processes is taken whole by each."""

    @property
    def rows(self) -> slice:
        """Return which rows these are."""
        return slice(self.start, self.stop)

    @property
    def weight(self) -> float:
        """Return what this part's mean counts in the average of all parts' means: 1 if all are equal."""
        return (self.stop - self.start) * world() / self.whole if self.shared else 1.0

    def rand(
        self,
        *shape: int,
        generator: torch.Generator,
        dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Draw for the whole, along a further dimension ``dim`` of ``shape``; return what is this part's."""
        whole = (*shape[:dim], self.whole, *shape[dim:])
        return torch.rand(whole, generator=generator, dtype=dtype).narrow(
            dim, self.start, self.stop - self.start
        )

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the whole, in place of ``value``, which is that over this part."""
        if world() == 1:
            return value
        return total(value.mul_(self.weight / world()))

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all parts, in order."""
        if world() == 1 or not self.shared:
            return rows
        parts = [_part(self.whole, number, world()) for number in range(world())]
        longest = max(part.stop - part.start for part in parts)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in parts]
        dist.all_gather(found, padded)
        return torch.cat([some[: part.stop - part.start] for some, part in zip(found, parts, strict=True)])


def all_of(count: int) -> Part:
    """Return ``count`` rows as the part of a process that shares them with no other."""
    return Part(0, count, count, shared=False)


def part(count: int) -> Part:
    """Return this process's part of ``count`` rows: consecutive ones, of as equal a number as can be."""
    return _part(count, rank(), world())


def _part(count: int, number: int, parts: int) -> Part:
    if count < parts:
        return all_of(count)
    return Part(number * count // parts, (number + 1) * count // parts, count)


def each(batch: int) -> int:
    """Return how many rows of a batch the largest part has."""
    return -(-batch // world())


def total(value: Tensor) -> Tensor:
    """Return the sum over the processes, in place."""
    if world() > 1:
        dist.all_reduce(value)
    return value


def synchronized(net: nn.Module, loss: Callable[[T], Tensor]) -> Callable[[T], Tensor]:
    """Return a loss whose gradients are averaged over the processes; for one process, the loss itself.

    It is wrapped anew for each training, as the head has grown. Which weights the loss covers is found out
    in the first step; the others stay as they are, as in one process.
    """
    if world() == 1 or not any(parameter.requires_grad for parameter in net.parameters()):
        return loss
    warnings.filterwarnings("ignore", "Grad strides do not match")  # of class tokens: 1 x 1 x width
    return DistributedDataParallel(_Loss(net, loss), static_graph=True, gradient_as_bucket_view=True)


class _Loss(nn.Module, Generic[T]):
    """A loss as a module: methods call more of a network than its forward, and all of it is synchronized."""

    def __init__(self, net: nn.Module, loss: Callable[[T], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, batch: T) -> Tensor:
        return self.loss(batch)


@torch.no_grad()
def agree(*modules: nn.Module) -> None:
    """Give all processes the weights of the first: what each computes alone may differ in the last bit."""
    if world() > 1:
        for module in modules:
            for value in module.state_dict().values():
                dist.broadcast(value, 0)


def refuse_difference(what: str, *values: object) -> None:
    """Stop all processes if they do not see the same: they would wait for each other, or mix two runs."""
    if world() == 1:
        return
    digest = sha256(repr(values).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    found = [torch.empty_like(mine) for _ in range(world())]
    dist.all_gather(found, mine)
    other = [number for number, one in enumerate(found) if not torch.equal(one, found[0])]
    if other:
        named = ", ".join(map(str, other))
        raise CofimaError(
            f"{what}: process {named} does not see what process 0 sees. All must be started by the same "
            "command, with the same images, and share the folder of the run"
        )
