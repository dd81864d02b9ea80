"""Price of CoFiMA over CoMA in whole runs, in units of plain forward and backward passes.

Both solve their heads in closed form, and differ in the Fisher information alone: that of the trained weights
of each task, and from the second task on that of the merged ones. ``python benchmarks/fisher_price.py``
prints the section of RESULTS.md.
"""

import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn.functional import cross_entropy

from cofima.experiment.config import check
from cofima.experiment.launch import launch
from cofima.experiment.stream import load_stream, stream_view
from cofima.models import backbone
from cofima.models.net import Net
from cofima.store.config import Config
from ratios import seconds

ROUNDS = 3
SHARED = {
    "dataset": "digits",
    "device": "cpu",
    "data": {"max_train_per_class": 48, "max_test_per_class": 8},
    "backbone": "tf_efficientnet_lite0",
    "model": {"pretrained": False, "img_size": 96},
    "stream": {"base_classes": 2, "increment": 2},
    "train": {"epochs": 3, "batch_size": 16, "batchnorm": "frozen"},
    "options": {"classifier": "lda"},
}


class Passes:
    """Plain forward and backward passes over a stream's images, as many as Fisher information is measured."""

    def __init__(self, config: Config) -> None:
        module, facts = backbone.create(config.backbone, config.model, config.seed)
        self.stream = load_stream(config, facts)
        self.view = stream_view(config, facts, self.stream)
        self.size, self.net = config.train.batch_size, Net(module, facts.features)
        self.net.grow(10, torch.Generator().manual_seed(0))
        self.net.eval()

    def __call__(self) -> None:
        """Pass once over the first task, and twice over the others."""
        for task in self.stream:
            for _ in range(2 if task.index else 1):
                for index in torch.arange(len(task.train)).split(self.size):
                    pixels, labels = task.train.batch(index)
                    cross_entropy(self.net(self.view.test(pixels)), labels).backward()
                    self.net.zero_grad()


def measure() -> dict[str, list[float]]:
    """Return the price in plain passes, and the whole run over CoMA's, round by round."""
    both = [check(SHARED | {"method": method}) for method in ("coma", "cofima")]
    found: dict[str, list[float]] = {"passes": [], "run": []}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, COFIMA_CACHE=f"{folder}/cache"):
        plain = Passes(both[0])
        plain()
        for number in range(ROUNDS):
            runs = [partial(launch, config, Path(folder) / f"{config.method}{number}") for config in both]
            unit, (coma, cofima) = seconds(plain), map(seconds, runs)
            found["passes"].append((cofima - coma) / unit)
            found["run"].append(cofima / coma)
            print(f"{unit:.1f} {coma:.1f} {cofima:.1f} s", file=sys.stderr, flush=True)
    return found


def main() -> str:
    """Measure; return a section of Markdown."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = measure()
    finally:
        torch.set_num_threads(threads)
    rows = {
        "what CoFiMA adds, over as many plain passes": ("passes", "<= 1.25x"),
        "the whole run, over CoMA's": ("run", "<= 1.7x"),
    }
    lines = [
        "## Price of CoFiMA",
        "",
        "EfficientNet-Lite0 at 96 px with channels last, digits in five tasks of 96 images, three epochs in",
        "batches of 16, closed-form heads, one thread: CPU time of whole runs, from building the backbone",
        "to the saved model. CoFiMA computes Fisher information nine times (at the trained weights",
        "after each task, at the merged ones from the second on); its price is the time in addition to",
        "CoMA's, divided by that of plain forward and backward passes over the same images.",
        "",
        "| | median | smallest | target |",
        "|---|---|---|---|",
    ]
    for what, (key, target) in rows.items():
        lines.append(f"| {what} | {statistics.median(found[key]):.2f}x | {min(found[key]):.2f}x | {target} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(main())
