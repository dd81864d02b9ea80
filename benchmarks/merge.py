"""Cost of merging two files, as a ratio to copying them: `python benchmarks/merge.py`."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from safetensors.torch import load_file, save_file

import cofima
from ratios import cells, interleaved

TENSORS = 100
ELEMENTS = 500_000
LAM = 0.4
MB = TENSORS * ELEMENTS * 4 / 1e6


def by_pickle(folder: Path) -> None:
    """Do what most scripts do."""
    a, b = (torch.load(folder / f"{name}.pth", weights_only=True) for name in "ab")
    torch.save({key: (1 - LAM) * a[key] + LAM * b[key] for key in a}, folder / "out.pth")


def fisher_by_pickle(folder: Path) -> None:
    a, b = (torch.load(folder / f"{name}.pth", weights_only=True) for name in "ab")
    f, g = (torch.load(folder / f"{name}.pth", weights_only=True) for name in "fg")
    weighted = {
        key: ((1 - LAM) * f[key] * a[key] + LAM * g[key] * b[key]) / ((1 - LAM) * f[key] + LAM * g[key])
        for key in a
    }
    torch.save(weighted, folder / "out.pth")


def by_safetensors(folder: Path) -> None:
    a, b = (load_file(folder / f"{name}.safetensors") for name in "ab")
    save_file({key: torch.lerp(a[key], b[key], LAM) for key in a}, folder / "out2.safetensors")


def copied(folder: Path, names: str) -> None:
    """Read and write as many bytes as a merge must at least, where it writes one file of what it reads."""
    for name in names:
        shutil.copyfile(folder / f"{name}.safetensors", folder / "copy.safetensors")


def main() -> str:
    """Measure; return a section of Markdown."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in "abfg":
            weights = {f"block.{k}.weight": torch.rand(ELEMENTS) for k in range(TENSORS)}
            save_file(weights, folder / f"{name}.safetensors")
            torch.save(weights, folder / f"{name}.pth")
        paths = {name: folder / f"{name}.safetensors" for name in "abfg"}
        models, fishers, out = [paths["a"], paths["b"]], [paths["f"], paths["g"]], folder / "out.safetensors"
        found = interleaved(
            lambda: copied(folder, "ab"),
            {
                "**cofima.merge, average**": lambda: cofima.merge(models, out, lam=LAM, force=True),
                "load_file, torch.lerp, save_file": lambda: by_safetensors(folder),
                "torch.load, average, torch.save": lambda: by_pickle(folder),
            },
            rounds=5,
        )
        found |= interleaved(
            lambda: copied(folder, "abfg"),
            {
                "**cofima.merge, fisher**": lambda: cofima.merge(
                    models, out, "fisher", fisher=fishers, lam=LAM, force=True
                ),
                "torch.load, Fisher average, torch.save": lambda: fisher_by_pickle(folder),
            },
            rounds=5,
        )
    lines = [
        "## Merging two files",
        "",
        f"Two files of {MB:.0f} MB in {TENSORS} tensors (and two of Fisher information), one thread, files",
        "in the page cache: CPU time divided by that of copying every file that is read. `cofima.merge` also",
        "flushes its result to disk, and needs only a few megabytes of memory",
        "(`tests/classifier/merge/test_merge_memory.py`); the other ways load whole models.",
        "",
        "| way | median | smallest |",
        "|---|---|---|",
    ]
    lines += [f"| {way} | {cells(ratios)} |" for way, ratios in found.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(main())
