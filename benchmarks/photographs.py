"""Time to the first training step on a small folder of photographs that an earlier run has decoded.

``python benchmarks/photographs.py`` prints the section of RESULTS.md.
"""

import os
import tempfile
from itertools import count
from pathlib import Path
from unittest.mock import patch

import torch

from cofima.experiment.config import check
from cofima.experiment.launch import launch
from cofima.methods.base import Method
from pipeline import jpegs
from ratios import cells, interleaved

CLASSES, PER_CLASS = 10, 200


class FirstStepError(Exception):
    """Raised where the first training step begins."""


def first_step(*_: object) -> None:
    raise FirstStepError


def write_photographs(folder: Path) -> None:
    """Write JPEG files of 500 x 375 pixels, and make them look as if they had lain there for long."""
    files = jpegs()
    for number in range(CLASSES * PER_CLASS):
        path = folder / f"class{number // PER_CLASS}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[number % len(files)])
        os.utime(path, (1e9, 1e9))


def main() -> str:
    """Measure; return a section of Markdown."""
    torch.set_num_threads(1)
    number = count()
    with (
        tempfile.TemporaryDirectory() as name,
        patch.dict(os.environ),
        patch.object(Method, "loss", first_step),
    ):
        folder = Path(name)
        write_photographs(folder / "photographs")
        config = check({"method": "seq_ft", "dataset": f"folder:{folder / 'photographs'}", "device": "cpu"})

        def run(cache: str) -> None:
            os.environ["COFIMA_CACHE"] = str(folder / cache)
            try:
                launch(config, folder / f"run{next(number)}")
            except FirstStepError:
                return
            raise RuntimeError("no step was taken")

        found = interleaved(lambda: run(f"cold{next(number)}"), {"warm": lambda: run("warm")}, rounds=3)
    return "\n".join(
        [
            "## Cached photographs",
            "",
            f"`seq_ft` with `vit_micro` on a folder of {CLASSES * PER_CLASS:,} photographs of 500 x 375",
            "pixels, one thread, from listing the files to the first training step (Python has started): CPU",
            "time if an earlier run has decoded them, divided by that if none has.",
            "",
            "| | median | smallest | target |",
            "|---|---|---|---|",
            f"| the second run | {cells(found['warm'])} | <= 0.2x |",
            "",
        ]
    )


if __name__ == "__main__":
    print(main())
