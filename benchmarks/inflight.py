"""Cost of checkpoints, by which a run survives kill -9 in the middle of a task."""

import resource
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from cofima.core.seeds import Seeds
from cofima.data.sources.in_memory import blobs
from cofima.data.stream import split
from cofima.experiment.config import read
from cofima.experiment.launch import launch
from cofima.experiment.stream import stream_view
from cofima.methods.seq_ft import SeqFT
from cofima.models import backbone
from cofima.models.net import Net
from cofima.models.options import ModelOptions
from cofima.store.config import Config
from cofima.training import checkpoint
from cofima.training.checkpoint import NO_CHECKPOINT, RunCheckpoint, Training
from cofima.training.context import Context, Hooks
from cofima.training.options import TrainOptions
from ratios import cells, interleaved


def every_step(rounds: int = 7) -> list[float]:
    """Return the cost of an epoch that is ready to be written after each step, over one that is not."""
    module, facts = backbone.create("vit_micro", ModelOptions())
    stream = split(blobs(classes=4, per_class=64, side=facts.stored), 4, 4, None)
    view = stream_view(Config(), facts, stream)
    method = SeqFT()
    context = Context(view, TrainOptions(epochs=1, batch_size=32, lr=1e-4), Seeds(0), torch.device("cpu"))
    method.setup(Net(module, facts.features), context)
    method.task, method.facts = stream[0], {"seconds": {}, "notes": []}
    method.begin(stream[0])

    def epoch(kept) -> None:
        kept.start_task(0, "")
        method.train(stream[0], Hooks(kept))

    with tempfile.TemporaryDirectory() as folder:
        ready = RunCheckpoint(Path(folder) / "inflight", method, {"environment": {}})
        return interleaved(lambda: epoch(NO_CHECKPOINT), {"ready": lambda: epoch(ready)}, rounds)["ready"]


def one_writing() -> tuple[float, float, float, float]:
    """Return MB, wall seconds, CPU seconds and MB of memory that the state of a ViT-B with SGD takes."""
    net = nn.ModuleList(nn.Linear(768, 4 * 768) for _ in range(36))  # 85 M weights
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for weight in net.parameters():
        optimizer.state[weight]["momentum_buffer"] = torch.randn_like(weight)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    training = Training(net, optimizer, schedule, augment=torch.Generator(), losses=torch.zeros(10))
    method = SeqFT()
    method.facts, method.running = {"seconds": {}, "notes": []}, {}
    with tempfile.TemporaryDirectory() as folder:
        mine = RunCheckpoint(Path(folder) / "inflight", method, {"environment": {}})
        mine.start_task(0, "")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        wall, cpu = time.perf_counter(), time.process_time()
        mine._write(training)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        size = sum(value.nbytes for value in training.tensors().values()) / 1e6
    assert not method.facts["notes"], method.facts["notes"]
    return size, wall, cpu, grown


def share_of_a_run() -> tuple[float, float, int]:
    """Return seconds of a run, the seconds that it spent on writing, and how often it wrote."""
    writings, whole = [], RunCheckpoint._write

    def write(self, training) -> None:
        whole(self, training)
        writings.append(training.step)

    checkpoint.EVERY, every = 1.0, checkpoint.EVERY
    RunCheckpoint._write = write
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = read("digits.yaml", ["method=joint", "options={}", "train.epochs=6"])
            history = launch(config, Path(folder) / "run").history
    finally:
        checkpoint.EVERY, RunCheckpoint._write = every, whole
    seconds = [row.seconds for row in history]
    return sum(s["total"] for s in seconds), sum(s["inflight"] for s in seconds), len(writings)


def main() -> str:
    """Measure; return a section of Markdown."""
    torch.set_num_threads(1)
    size, wall, cpu, grown = one_writing()
    ready = every_step()
    total, spent, times = share_of_a_run()
    return "\n".join(
        [
            "## Surviving kill -9 in the middle of a task",
            "",
            "`vit_micro`, one thread. First row: the CPU time of an epoch that can be checkpointed",
            "after each step, divided by that of one that cannot. Second row: the share of a run's time",
            f"spent on writing, if it may write every second instead of every minute ({times} times in",
            f"{total:.0f} s). One checkpoint of a ViT-B with SGD ({size:.0f} MB) took {wall:.1f} s",
            f"({cpu:.1f} s CPU) and {grown:.0f} MB of memory; the next one then waits until both are",
            "within 2 % of the time.",
            "",
            "| | median | smallest | target |",
            "|---|---|---|---|",
            f"| an epoch with checkpoints after each step | {cells(ready)} | <= 1.05x |",
            f"| share of writing in a run | {100 * spent / total:.2f} % | | <= 2 % |",
            "",
        ]
    )


if __name__ == "__main__":
    print(main())
