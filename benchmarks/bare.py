"""Whole runs against a bare loop: the same mathematics on the same images, and nothing else.

The loop below trains, merges, remembers, aligns and tests as the methods do, with plain PyTorch and the
library's functions on weights and features; it knows no configuration, no folder, no history, no
checkpoint and no progress. ``python benchmarks/bare.py`` prints the section of RESULTS.md.
"""

import os
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima import average, diagonal_fisher, fisher_average
from cofima.core.seeds import Seeds
from cofima.data.image_set import ImageSet
from cofima.data.stream import Stream, Task
from cofima.data.transforms import View
from cofima.experiment.config import check
from cofima.experiment.launch import launch
from cofima.experiment.stream import load_stream, stream_view
from cofima.methods.components.alignment import AlignOptions, align, task_of_class
from cofima.methods.components.fisher import PassingFeatures
from cofima.methods.components.gaussians import ClassGaussians, by_class, mean_scale
from cofima.methods.components.projection import ProjectedHead, RidgeSums, best_ridge
from cofima.models import backbone
from cofima.models.net import Net
from cofima.store.config import Config
from cofima.training.context import Context
from ratios import cells, interleaved

SHARED = {
    "dataset": "digits",
    "device": "cpu",
    "stream": {"base_classes": 2, "increment": 2},
}
FEW = {"data": {"max_train_per_class": 32, "max_test_per_class": 16}}
CLASSES, TRAIN, TEST = 20, 200, 50  # of ``ranpac``, whose images pass once
IMAGES = {"slca": FEW, "coma": FEW, "cofima": FEW}  # each run takes some ten seconds or more
ALIGN = {"epochs": 10}
OPTIONS = {
    "slca": {"align": ALIGN},
    "coma": {"align": ALIGN, "lam": 0.4},
    "cofima": {"align": ALIGN, "lam": 0.4},
    "ranpac": {"petl": "none", "projection": 1000},
}


class Loop:
    """The bare loop of one run."""

    def __init__(self, config: Config) -> None:
        module, facts = backbone.create(config.backbone, config.model, config.seed)
        self.stream: Stream = load_stream(config, facts)
        self.view: View = stream_view(config, facts, self.stream)
        self.how, self.options, self.method = config.train, config.options, config.method
        self.net = Net(module, facts.features)
        self.context = Context(self.view, config.train, Seeds(0), torch.device("cpu"), len(self.stream))
        self.chance = torch.Generator().manual_seed(0)
        self.old_fisher: dict[str, Tensor] = {}

    def run(self) -> list[float]:
        """Learn and test all tasks; return the last accuracies."""
        accuracies: list[float] = []
        for task in self.stream:
            predict = self.ranpac(task) if self.method == "ranpac" else self.slow_learner(task)
            accuracies = [self.test(predict, seen) for seen in self.stream[: task.index + 1]]
        return accuracies

    def slow_learner(self, task: Task) -> torch.nn.Module:
        """Learn a task as SLCA, CoMA or CoFiMA; return the aligned head."""
        if task.index == 0:
            self.gaussians = ClassGaussians()
        old = {key: value.clone() for key, value in self.net.state_dict().items()}
        self.net.grow(len(task.classes), self.chance)
        self.train(task)
        new, lam, passing = self.net.state_dict(), self.options.get("lam", 1.0), None
        if task.index and self.method == "coma":
            average(old, new, lam, out=new)
        if self.method == "cofima":
            fisher, passing = self.fisher(task)
            if task.index:
                fisher_average(old, new, self.old_fisher, fisher, lam, out=new)
                fisher, passing = self.fisher(task)
            self.old_fisher = fisher
        passing = self.features(task.train) if passing is None else passing
        for features in by_class(passing, task.train.labels).values():
            self.gaussians.add(features)
        if task.index == 0:
            return self.net.head
        scale = mean_scale(task_of_class(self.net.head))
        how = AlignOptions(**self.options["align"])
        return align(self.net.head, self.gaussians, scale, how, self.context, task.index)

    def train(self, task: Task) -> None:
        """Fine-tune on the task's images."""
        how, images = self.how, task.train
        groups = [
            {"params": list(self.net.backbone.parameters()), "lr": how.lr * how.backbone_lr_scale},
            {"params": list(self.net.head.blocks[-1].parameters())},
        ]
        optimizer = torch.optim.SGD(groups, how.lr, how.momentum, weight_decay=how.weight_decay)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, how.decays, how.gamma)
        self.net.train()
        for _ in range(how.epochs):
            for index in torch.randperm(len(images), generator=self.chance).split(how.batch_size):
                pixels, labels = images.batch(index)
                logits = self.net(self.view.train(pixels, self.chance))[:, task.classes.start :]
                optimizer.zero_grad()
                cross_entropy(logits, labels - task.classes.start).backward()
                optimizer.step()
            schedule.step()
        self.net.zero_grad()
        self.net.eval()

    def fisher(self, task: Task) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the Fisher information of the present weights, and the features that passed by."""
        parts, passing = torch.arange(len(task.train)).split(self.how.batch_size), PassingFeatures()
        batches = (task.train.batch(index) for index in parts)
        pairs = ((self.view.test(pixels), labels) for pixels, labels in batches)
        fisher = diagonal_fisher(self.net, passing.watch(self.net, pairs))
        return fisher, passing.all(len(task.train))

    @torch.inference_mode()
    def features(self, images: ImageSet) -> Tensor:
        """Return the features of images."""
        parts = torch.arange(len(images)).split(self.how.batch_size)
        return torch.cat([self.net.features(self.view.test(images.batch(index)[0])) for index in parts])

    def ranpac(self, task: Task) -> torch.nn.Module:
        """Learn a task as RanPAC without adaptation; return the ridge regression."""
        if task.index == 0:
            self.net.eval()
            width = self.net.head.features
            self.readout = ProjectedHead(width, self.options["projection"], self.chance)
            self.sums = RidgeSums.empty(self.options["projection"])
            self.tested: dict[int, Tensor] = {}
        self.readout.grow(len(task.classes), self.chance)
        features, labels = self.features(task.train), task.train.labels
        self.sums.add_images(self.readout, features, labels, task.classes.stop)
        weight, _ = self.sums.solve(best_ridge(self.readout, features, labels, self.chance))
        self.readout.load_flat(weight, torch.zeros(len(weight)))
        self.tested[task.index] = self.features(task.test)
        return self.readout

    @torch.inference_mode()
    def test(self, head: torch.nn.Module, task: Task) -> float:
        """Return the accuracy on a task's test images."""
        features = self.tested[task.index] if self.method == "ranpac" else self.features(task.test)
        return 100 * float((head(features).argmax(1) == task.test.labels).double().mean())


def write_pictures(folder: Path) -> dict[str, Any]:
    """Write pictures of noise, all different; return the settings of a run on them."""
    chance = np.random.default_rng(0)
    for part, each in ("train", TRAIN), ("test", TEST):
        for label in range(CLASSES):
            here = folder / part / f"class{label}"
            here.mkdir(parents=True)
            for number in range(each):
                small = chance.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(small).resize((64, 64)).save(here / f"{number}.png")
    return {"dataset": f"folder:{folder}", "stream": {"base_classes": 10, "increment": 10}}


def main() -> str:
    """Measure; return a section of Markdown."""
    torch.set_num_threads(1)
    rows, stages = [], []
    number = count()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, COFIMA_FEATURES="off"):
        os.environ["COFIMA_CACHE"] = f"{folder}/cache"
        images = IMAGES | {"ranpac": write_pictures(Path(folder) / "pictures")}
        for method, options in OPTIONS.items():
            train = {"epochs": 2, "batch_size": 16}
            own = {"method": method, "options": options, "train": train, **images[method]}
            config = check(SHARED | own)
            runs = []

            def ours(config: Config = config, runs: list = runs) -> None:
                runs.append(launch(config, Path(folder) / f"{next(number)}"))

            found = interleaved(lambda config=config: Loop(config).run(), {"ours": ours}, rounds=2)["ours"]
            rows.append(f"| `{method}` | {cells(found)} | <= 1.05x |")
            print(rows[-1], file=sys.stderr, flush=True)
            seconds: dict[str, float] = {}
            for row in runs[-1].history:
                for stage, value in row.seconds.items():
                    seconds[stage] = seconds.get(stage, 0.0) + value
            total, _ = seconds.pop("total"), seconds.pop("cpu", None)
            shares = ", ".join(f"{stage} {100 * value / total:.0f} %" for stage, value in seconds.items())
            stages.append(
                f"| `{method}` | {shares}, other {100 * (1 - sum(seconds.values()) / total):.0f} % |"
            )
    return "\n".join(
        [
            "## Whole runs",
            "",
            "Digits in five tasks, 32 training and 16 test images per class (`ranpac`, whose images pass",
            f"once: {CLASSES * (TRAIN + TEST):,} pictures of {CLASSES} classes in two tasks), `vit_micro`,",
            "two epochs in batches of 16, one thread: CPU time of a run, from reading images and building",
            "the backbone to the saved model, divided by that of a bare loop (`benchmarks/bare.py`) with the",
            "same mathematics and nothing else.",
            "",
            "| | median | smallest | target |",
            "|---|---|---|---|",
            *rows,
            "",
            "`ranpac` computes more than the loop: features are computed in batches of exactly 32, the last",
            "one padded, so that a feature depends on its image alone and can be cached; a first batch tests",
            "that. These are about 100 images more in a run of any size: with 1,360 images it was 1.11x.",
            "",
            "Shares of the time in which tasks are learned and tested:",
            "",
            "| | |",
            "|---|---|",
            *stages,
            "",
        ]
    )


if __name__ == "__main__":
    print(main())
