"""Time and memory of class statistics, alignment, saving and evaluation as a stream grows.

Features are generated. Each case is learned in a process of its own, whose peak of memory is that of the
case. ``python benchmarks/scaling.py`` prints the section of RESULTS.md.
"""

import math
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cofima.core.seeds import Seeds
from cofima.data.image_set import ImageSet
from cofima.data.stream import Task
from cofima.data.transforms import View
from cofima.methods.components.alignment import AlignOptions, align, task_of_class
from cofima.methods.components.gaussians import ClassGaussians, mean_scale
from cofima.methods.prototype import Prototype
from cofima.models.head import Head
from cofima.models.net import Net
from cofima.training.context import Context
from cofima.training.options import TrainOptions

SIDE = 4
CONTEXT = Context(
    View(SIDE, SIDE, (0.5,) * 3, (0.5,) * 3), TrainOptions(), Seeds(0), torch.device("cpu"), tasks=50
)
ALIGNED_TWICE = 1_000  # classes, above which an alignment takes a minute
STAGES = ("statistics", "align", "save", "load")


class Case(NamedTuple):
    """The size of a stream of generated features, and the features that are drawn a class to align."""

    classes: int
    images: int  # per class
    width: int
    tasks: int
    drawn: int


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the CPU time of the context to a stage."""
    start = time.process_time()
    yield
    seconds[stage] += time.process_time() - start


def learn(case: Case) -> dict[str, float]:
    """Learn a stream task by task, save, load, add one more class; return seconds a stage and peak bytes."""
    torch.set_num_threads(1)
    seconds = dict.fromkeys(STAGES, 0.0)
    chance, gaussians, head = torch.Generator().manual_seed(0), ClassGaussians(), Head(case.width)
    for size in [case.classes // case.tasks] * case.tasks:
        head.grow(size, chance)
        for _ in range(size):
            features = torch.randn(case.images, case.width, generator=chance)
            with timed(seconds, "statistics"):
                gaussians.add(features)
    how = AlignOptions(epochs=1, samples_per_class=case.drawn)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gaussians.safetensors"
        for extended in range(2):
            if not extended or case.classes <= ALIGNED_TWICE:
                with timed(seconds, "align"):
                    align(head, gaussians, mean_scale(task_of_class(head)), how, CONTEXT, extended)
            with timed(seconds, "save"):
                save_file(gaussians.state(), path)
            with timed(seconds, "load"):
                gaussians = ClassGaussians.restore(load_file(path))
            head.grow(1, chance)
            gaussians.add(torch.randn(case.images, case.width, generator=chance))
    return seconds | {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def evaluate(tasks: int) -> dict[str, float]:
    """Learn and test a stream with a fixed backbone; return how many images passed it, and the seconds."""
    torch.set_num_threads(1)
    passed = []

    class Counting(nn.Flatten):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            passed.append(len(x))
            return super().forward(x)

    method, chance, seen = Prototype(), torch.Generator().manual_seed(0), []
    method.setup(Net(Counting(), 3 * SIDE**2), CONTEXT)
    start = time.process_time()
    for index in range(tasks):
        parts = []
        for _ in range(2):
            pixels = torch.randint(256, (64, 3, SIDE, SIDE), dtype=torch.uint8, generator=chance)
            parts.append(ImageSet(pixels, torch.arange(64), torch.arange(64) % 2 + 2 * index))
        seen.append(Task(index, range(2 * index, 2 * index + 2), (f"{index}a", f"{index}b"), *parts))
        method.learn(seen[-1])
        method.score(seen)
    return {"images": float(sum(passed)), "seconds": time.process_time() - start}


def alone(work: Callable[[Case | int], dict[str, float]], case: Case | int) -> dict[str, float]:
    """Work in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(work, (case,))


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of a curve on logarithmic scales, by least squares."""
    x = torch.tensor([[math.log(size), 1.0] for size in sizes])
    y = torch.tensor([[math.log(value)] for value in values])
    return float(torch.linalg.lstsq(x, y).solution[0])


def curve(title: str, sizes: Sequence[int], cases: Sequence[Case], stages: Sequence[str]) -> list[str]:
    """Return the rows of a curve, and its exponents."""
    print(f"{title} ...", file=sys.stderr, flush=True)
    found = [alone(learn, case) for case in cases]
    rows = []
    for size, one in zip(sizes, found, strict=True):
        shown = [f"{one[stage]:.3g} s" if stage in stages else "" for stage in STAGES]
        rows.append(f"| {size:,} {title} | " + " | ".join(shown) + f" | {one['peak'] / 1e6:,.0f} MB |")
    slopes = [
        f"{exponent(sizes, [one[stage] for one in found]):.2f}" if stage in stages else "" for stage in STAGES
    ]
    rows.append(f"| exponent in {title} | " + " | ".join(slopes) + " |  |")
    print("\n".join(rows), file=sys.stderr, flush=True)
    return rows


def main() -> str:
    """Measure; return a section of Markdown."""
    lines = [
        "## Growth",
        "",
        "`python benchmarks/scaling.py`: generated features, one thread, CPU seconds over all tasks; each",
        "row is a separate process, whose peak memory includes Python and torch. Alignment is one epoch",
        "with few sampled features per class (with as many steps as there are classes, each over all",
        "classes), done twice: after learning, and after one more class was added to the loaded model",
        "(10,000 classes: once). An exponent is the slope on logarithmic scales.",
        "",
        "| stream | statistics | align | save | load | peak |",
        "|---|---|---|---|---|---|",
    ]
    classes, images, tasks = [100, 200, 500, 1000], [1_000, 5_000, 20_000, 50_000], [5, 10, 20, 50]
    lines += curve(
        "classes of 25 images, width 1280", classes, [Case(c, 25, 1280, 10, 8) for c in classes], STAGES
    )
    lines += curve(
        "images of 100 classes, width 128",
        images,
        [Case(100, n // 100, 128, 10, 8) for n in images],
        ["statistics"],
    )
    lines += curve(
        "tasks of 500 classes, width 128", tasks, [Case(500, 25, 128, t, 8) for t in tasks], STAGES[:2]
    )
    for case in (Case(10_000, 25, 128, 10, 4), Case(1_000, 25, 1280, 10, 256)):
        one = alone(learn, case)
        what = f"{case.classes:,} classes of 25 images, width {case.width}, {case.drawn} sampled per class"
        shown = " | ".join(f"{one[stage]:.3g} s" for stage in STAGES)
        lines.append(f"| {what} | {shown} | {one['peak'] / 1e6:,.0f} MB |")
        print(lines[-1], file=sys.stderr, flush=True)
    with patch.dict(os.environ, COFIMA_FEATURES="off"):  # on disk, one case would find those of another
        found = [alone(evaluate, t) for t in tasks]
    passed, spent = ([one[key] for one in found] for key in ("images", "seconds"))
    lines += [
        "",
        "Learning and testing with a fixed backbone (`prototype`, 64 + 64 images per task; all tasks",
        "seen are tested after each):",
        "",
        "| | " + " | ".join(f"{t} tasks" for t in tasks) + " | exponent |",
        "|---|" + "---|" * (len(tasks) + 1),
        f"| images | {' | '.join(f'{128 * t:,}' for t in tasks)} | |",
        f"| passes through the backbone | {' | '.join(f'{n:,.0f}' for n in passed)} "
        f"| {exponent(tasks, passed):.2f} |",
        f"| CPU seconds in all | {' | '.join(f'{s:.2f}' for s in spent)} | {exponent(tasks, spent):.2f} |",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(main())
