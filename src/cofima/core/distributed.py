"""Distributed data parallelism: one run in several processes started by ``torchrun``.

All processes read the same configuration and images and draw the same random numbers; each computes its
shard of every batch. The shards are combined by reductions and gathers, so that all processes continue with
the same weights. In a single process, all functions here are identities.

Information from the environment, available without importing torch, is in :mod:`cofima.core.torchrun`.
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

TIMEOUT = timedelta(hours=2)  # to wait for a process that decodes images; torchrun detects dead ones itself


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; rank 0 writes the files."""
    return dist.get_rank() if world_size() > 1 else 0


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the process group within the context; leave it when all processes have finished.

    After an error, processes do not wait for each other: torchrun ends the others.
    """
    if torchrun.world_size() == 1 or dist.is_initialized():
        yield
        return
    from torch._C._distributed_c10d import PrefixStore  # missing in some builds of torch
    from torch.distributed.rendezvous import rendezvous

    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, number, count = next(rendezvous("env://", timeout=TIMEOUT))
    # After a restart by torchrun, entries of dead processes in the store must not be read.
    fresh = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=fresh, rank=number, world_size=count, timeout=TIMEOUT)
    yield
    all_reduce_sum(torch.zeros(1))  # barrier: the last task is on disk before any process leaves
    dist.destroy_process_group()


@dataclass(frozen=True)
class Shard:
    """Rows ``start`` to ``stop`` of ``whole``: one process's part of a batch or a set of images."""

    start: int
    stop: int
    whole: int
    shared: bool = True
    """False if each process has all rows, as for a batch with fewer rows than processes."""

    @property
    def rows(self) -> slice:
        """Rows as a slice."""
        return slice(self.start, self.stop)

    @property
    def weight(self) -> float:
        """Weight of this shard's mean in the average over all shards; 1 if all are equally large."""
        return (self.stop - self.start) * world_size() / self.whole if self.shared else 1.0

    def rand(
        self,
        *shape: int,
        generator: torch.Generator,
        dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Draw uniform numbers for all rows, along an extra dimension ``dim``; return those of this shard.

        Every process draws all numbers, so that those of a sample do not depend on the number of processes.
        """
        whole = (*shape[:dim], self.whole, *shape[dim:])
        return torch.rand(whole, generator=generator, dtype=dtype).narrow(
            dim, self.start, self.stop - self.start
        )

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over all rows, given the mean ``value`` over this shard (modified in place)."""
        if world_size() == 1:
            return value
        return all_reduce_sum(value.mul_(self.weight / world_size()))

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all shards, in order."""
        if world_size() == 1 or not self.shared:
            return rows
        shards = [_shard(self.whole, number, world_size()) for number in range(world_size())]
        sizes = [shard.stop - shard.start for shard in shards]
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows  # all_gather needs equal sizes
        gathered = [torch.empty_like(padded) for _ in shards]
        dist.all_gather(gathered, padded)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])


def full_shard(count: int) -> Shard:
    """Return a shard of all ``count`` rows, not split among processes."""
    return Shard(0, count, count, shared=False)


def current_shard(count: int) -> Shard:
    """Return this process's shard of ``count`` rows: consecutive rows, nearly equally many per process."""
    return _shard(count, rank(), world_size())


def _shard(count: int, number: int, shards: int) -> Shard:
    if count < shards:
        return full_shard(count)
    return Shard(number * count // shards, (number + 1) * count // shards, count)


def largest_shard(count: int) -> int:
    """Return the number of rows in the largest shard of ``count`` rows."""
    return -(-count // world_size())


def all_reduce_sum(value: Tensor) -> Tensor:
    """Sum a tensor over all processes in place, and return it."""
    if world_size() > 1:
        dist.all_reduce(value)
    return value


def all_gather_objects(value: T) -> list[T]:
    """Return the values of all processes, in order of rank."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def synchronized(net: nn.Module, loss: Callable[[T], Tensor]) -> Callable[[T], Tensor]:
    """Return a loss whose gradients are averaged over processes; in a single process, the loss itself.

    It is wrapped again for each training, since the head has grown. The first step (``static_graph``)
    determines the weights that the loss depends on; the others get no gradient, as in a single process.
    """
    if world_size() == 1 or not any(parameter.requires_grad for parameter in net.parameters()):
        return loss
    warnings.filterwarnings("ignore", "Grad strides do not match")  # for class tokens: 1 x 1 x width
    return DistributedDataParallel(LossModule(net, loss), static_graph=True, gradient_as_bucket_view=True)


class LossModule(nn.Module, Generic[T]):
    """Loss as a module: methods call more of a network than its forward, and all must be synchronized."""

    def __init__(self, net: nn.Module, loss: Callable[[T], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, batch: T) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(batch)


@torch.no_grad()
def broadcast_weights(*modules: nn.Module) -> None:
    """Copy the weights of rank 0 to all others: separately computed results may differ in the last bit."""
    if world_size() > 1:
        for module in modules:
            for value in module.state_dict().values():
                dist.broadcast(value, 0)


def require_same(what: str, *values: object) -> None:
    """Raise in all processes if their values differ, since they would deadlock or mix two runs."""
    if world_size() == 1:
        return
    digest = sha256(repr(values).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    all_digests = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(all_digests, mine)
    other = [number for number, one in enumerate(all_digests) if not torch.equal(one, all_digests[0])]
    if other:
        named = ", ".join(map(str, other))
        raise CofimaError(
            f"{what}: process {named} does not see what process 0 sees. All must be started by the same "
            "command, with the same images, and share the folder of the run"
        )
