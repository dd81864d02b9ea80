"""Cost of a second run of a method with a fixed backbone, which finds its features in the cache."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

from cofima.experiment.config import check
from cofima.experiment.launch import launch
from ratios import cells, interleaved


@contextmanager
def somewhere() -> Iterator[Path]:
    """Work in a folder that is gone afterwards, and leave the user's cache alone."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield Path(folder)
        finally:
            os.environ.clear()
            os.environ.update(before)


def main() -> str:
    """Measure; return a section of Markdown."""
    torch.set_num_threads(1)
    config = check({"method": "prototype", "dataset": "digits", "device": "cpu"})
    number = count()
    with somewhere() as folder:

        def run(cache: str, features: str = "on") -> None:
            os.environ.update(COFIMA_CACHE=str(folder / cache), COFIMA_FEATURES=features)
            launch(config, folder / f"run{next(number)}")

        ways = {"warm": lambda: run("warm"), "off": lambda: run("warm", "off")}
        found = interleaved(lambda: run(f"cold{next(number)}"), ways, rounds=5)
    return "\n".join(
        [
            "## Cached features",
            "",
            "`prototype` on the digits in five tasks with `vit_micro`, one thread, from reading images to",
            "writing the model: CPU time of a run divided by that of the same run with an empty cache.",
            "",
            "| | median | smallest | target |",
            "|---|---|---|---|",
            f"| the same run again | {cells(found['warm'])} | <= 0.5x |",
            f"| with `COFIMA_FEATURES=off` | {cells(found['off'])} |  |",
            "",
        ]
    )


if __name__ == "__main__":
    print(main())
