"""A classifier that grows as a user's would: 20 classes, then 10 more, then one, then five.

Every step is the command that a user gives, in a process of its own; classes are drawn by seed from
Caltech-101, and the 36 are learned at once too, and by plain fine-tuning. Measured on the test images of
all classes known so far. Run it again to continue; it writes STEPS.md:

    COFIMA_DATA=/where/caltech101/is python benchmarks/steps.py [--table]
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import cofima
from one_by_one import linked

HERE = Path(__file__).parent
RESULTS = HERE / "steps.jsonl"
GROUPS, SEEDS = (20, 10, 1, 5), (0, 1, 2)
COMMON = ["--backbone", "tf_efficientnet_lite0", "model.img_size=96"]
WAYS = {
    "at once": ("`cofima learn` of all 36", []),
    "cofima": ("`cofima learn`, `cofima extend` three times", []),
    "slow": ("the same with `--method seq_ft`: fine-tuning, the backbone slow", ["--method", "seq_ft"]),
    "plain": (
        "the same with `--method seq_ft train.lr=0.001 train.backbone_lr_scale=1`: fine-tuning, one rate",
        ["--method", "seq_ft", "train.lr=0.001", "train.backbone_lr_scale=1"],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="run nothing; write the page")
    arguments = parser.parse_args()
    root = Path(os.environ.get("COFIMA_DATA", "../shared/data")).resolve() / "caltech101"
    for seed in () if arguments.table else SEEDS:
        for way in WAYS:
            if (way, seed) not in known():
                found = {"way": way, "seed": seed, "steps": measure(root, way, seed)}
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
                print(found, flush=True)
    write()


def measure(root: Path, way: str, seed: int) -> list[dict[str, Any]]:
    """Learn step by step; return what each step took, and the accuracy after it on all classes so far."""
    drawn = random.Random(seed).sample(sorted(p.name for p in (root / "train").iterdir()), sum(GROUPS))
    groups = [drawn] if way == "at once" else [[drawn.pop(0) for _ in range(size)] for size in GROUPS]
    steps, so_far = [], []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = str(place / "model")
        for number, group in enumerate(groups):
            so_far += group
            photos = str(linked(root / "train", group, place / f"photos {number}"))
            test = linked(root / "test", so_far, place / f"test {number}")
            first = ["learn", photos, *COMMON, *WAYS[way][1], "--seed", str(seed), "-o", model]
            seconds, memory = timed(first if number == 0 else ["extend", model, photos])
            accuracy = round(cofima.load(model).evaluate(test).accuracy.mean_of_classes, 2)
            steps.append({"classes": len(so_far), "accuracy": accuracy, "seconds": seconds, "mb": memory})
    return steps


def timed(arguments: list[str]) -> tuple[float, float]:
    """Run a command of cofima; return its CPU seconds, and the most memory that it used, in MB."""
    process = subprocess.Popen([sys.executable, "-m", "cofima", *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"cofima {' '.join(arguments)} ended with status {status}")
    return round(used.ru_utime + used.ru_stime, 1), round(used.ru_maxrss * 1024 / 1e6)


def known() -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return what has been measured."""
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    return {(found["way"], found["seed"]): found["steps"] for found in map(json.loads, lines)}


def write() -> None:
    """Write the tables below what STEPS.md says of itself."""
    results = known()
    lines = [
        "| how | seeds | accuracy after 20 | after 30 | after 31 | after 36 |",
        "|---|---|---|---|---|---|",
    ]
    for way, (what, _) in WAYS.items():
        runs = [results[way, seed] for seed in SEEDS if (way, seed) in results]
        shown = [mean([run[at]["accuracy"] for run in runs]) for at in range(len(runs[0]) if runs else 0)]
        lines.append(f"| {what} | {len(runs)} | {' | '.join(['–'] * (4 - len(shown)) + shown)} |")
    lines += ["", "| step | CPU s | peak MB |", "|---|---|---|"]
    for at, what in enumerate(["learn 20 classes", "add 10", "add 1", "add 5"]):
        steps = [results["cofima", seed][at] for seed in SEEDS if ("cofima", seed) in results]
        if steps:
            seconds, most = (fmean(step[key] for step in steps) for key in ("seconds", "mb"))
            lines.append(f"| {what} | {seconds:.0f} | {most:.0f} |")
    text = (HERE / "steps.head.md").read_text("utf-8")
    (HERE / "STEPS.md").write_text(text + "\n" + "\n".join(lines) + "\n", "utf-8")


def mean(values: list[float]) -> str:
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{spread}"


if __name__ == "__main__":
    main()
