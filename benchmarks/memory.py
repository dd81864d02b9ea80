"""Peak of memory of each command, in units of the model's weights.

Each command runs in a process of its own, with a ViT-Small of random weights at 32 pixels, whose activations
are small beside its weights. Counted is what is added to a process that has imported everything.
``python benchmarks/memory.py`` prints the section of RESULTS.md; only Linux tells the peaks.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

BACKBONE, PARAMETERS = "vit_small_patch16_224", 21_600_000
MODEL = 4 * PARAMETERS  # bytes
CHILD = """
import re, sys
import safetensors.torch
import cofima.classifier.classifier, cofima.classifier.merge.merge, cofima.experiment.launch
from cofima.cli.main import main
import torch
torch.set_num_threads(1)
memory = lambda key: 1024 * int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1))
torch.ones(8, 8) @ torch.ones(8, 8)
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
try:
    main()
finally:
    print("added", memory("VmHWM") - before, file=sys.stderr)
"""
WORDS = {
    "dataset": "folder:photos",
    "backbone": BACKBONE,
    "model": "{pretrained: false, img_size: 32}",
    "stream": "{base_classes: 2, increment: 2}",
    "train": "{epochs: 1, batch_size: 4}",
    "device": "cpu",
}
RUNS = ("seq_ft", "slca", "coma", "cofima", "ranpac")


def run_words(method: str) -> list[str]:
    """Return the words of ``cofima run`` with a method."""
    settings = [f"{key}={value}" for key, value in WORDS.items()]
    own = {"ranpac": ["options={petl: none, projection: 500}"]}.get(method, [])
    return ["run", "paper.yaml", f"method={method}", *settings, *own, "--out", f"runs/{method}"]


def commands() -> dict[str, list[str]]:
    """Return the words of each command, in an order in which each finds what it needs."""
    settings = [f"{key}={WORDS[key]}" for key in ("model", "train", "device")]
    weighted = ["merge", "runs/coma", "runs/cofima", "-o", "weighted", "--method", "fisher"]
    return {
        **{f"`run`, `{method}`": run_words(method) for method in RUNS},
        "`learn --fast`": ["learn", "photos", "--backbone", BACKBONE, *settings, "--fast", "-o", "fast"],
        "`learn`": ["learn", "photos", "--backbone", BACKBONE, *settings, "-o", "whole"],
        "`extend --fast`": ["extend", "fast", "more", "--fast"],
        "`extend`": ["extend", "whole", "more", "train.epochs=1"],
        "`predict`": ["predict", "whole", "photos"],
        "`evaluate`": ["evaluate", "whole", "photos"],
        "`merge`, average": ["merge", "runs/coma", "runs/slca", "-o", "both"],
        "`fisher`": ["fisher", "runs/cofima", "photos", "-o", "f.safetensors"],
        "`merge`, fisher": [*weighted, "--fisher", "g.safetensors", "f.safetensors"],
        "`export --torchscript`": ["export", "whole", "--torchscript", "model.pt"],
    }


def write_photos(folder: Path, names: str) -> None:
    """Write thirty small pictures of noise for each class: fewer could not judge a fine-tuning."""
    chance = np.random.default_rng(0)
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(30):
            pixels = chance.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def added(words: list[str], folder: Path) -> float:
    """Return the bytes that a command adds at its peak to a process that has imported everything."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "-q", *words],
        cwd=folder,
        env=os.environ | {"COFIMA_CACHE": "off", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr}")
    return float(done.stderr.rpartition("added ")[2])


def main() -> str:
    """Measure; return a section of Markdown."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photos(folder / "photos", "abcd")
        write_photos(folder / "more", "efg")  # two classes could not tell what is lost
        for what, words in commands().items():
            if what == "`merge`, fisher":
                added(["fisher", "runs/coma", "photos", "-o", "g.safetensors"], folder)
            rows.append(f"| {what} | {added(words, folder) / MODEL:.1f} |")
            print(rows[-1], file=sys.stderr, flush=True)
    return "\n".join(
        [
            "## Memory of each command",
            "",
            f"`python benchmarks/memory.py`: a ViT-Small ({MODEL / 1e6:.0f} MB of weights) at 32 px, batches",
            "of 4, 120 pictures in 4 classes, two tasks. The peak memory that a command adds to a",
            "process that has imported everything, in units of one model: training holds weights, gradients",
            "and momentum; CoMA also the weights before the task, CoFiMA also Fisher information.",
            "Memory-mapped pages of a merge count while they are in memory, although the system may",
            "reclaim them.",
            "",
            "| command | peak, in models |",
            "|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    print(main())
