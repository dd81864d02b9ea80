"""How the demo's recipe was chosen: one factor at a time, on held-out training images.

Run it again to continue; it writes benchmarks/DEMO_RECIPE.md:

    python benchmarks/demo_recipe.py [--out runs/demo_recipe] [--seeds 1993 1996 1997]
"""

import argparse
import hashlib
import json
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from cofima.config import _override, check
from cofima.experiment.launch import launch
from cofima.report.metrics import accuracies_over_time

BASE: dict[str, Any] = {
    "dataset": "digits",
    "backbone": "vit_micro",
    "held_out": 0.25,
    "stream": {"first": 2, "increment": 2},
    "train": {"epochs": 2, "batch": 32, "lr": 0.01, "backbone_lr_scale": 0.1},
    "options": {"align": {"epochs": 50, "temperature": 1.0}},
}
PAPER = ["train.batch=128", "train.backbone_lr_scale=0.01", "options.align={}"]
FACTORS: dict[str, list[list[str]]] = {
    "the paper's values, 2 epochs": [PAPER],
    "learning rate of the backbone, relative to the head's": [
        [f"train.backbone_lr_scale={s}"] for s in (0.0, 0.01, 0.03, 0.3)
    ],
    "learning rate of the head": [[f"train.lr={lr}"] for lr in (0.003, 0.03)],
    "epochs": [[f"train.epochs={e}"] for e in (1, 3)],
    "batch": [[f"train.batch={b}"] for b in (16, 64)],
    "alignment: temperature": [["options.align.temperature=0.1"], ["options.align.temperature=0.3"]],
    "alignment: epochs": [["options.align.epochs=5"], ["options.align.epochs=150"]],
    "alignment: learning rate": [["options.align.lr=0.03"]],
    "lam": [["options.lam=0.2"], ["options.lam=0.6"], ["options.lam=auto"]],
}


def cell(method: str, changes: list[str], seed: int, out: Path) -> dict[str, float]:
    """Learn one setting, or read what it gave before."""
    values = json.loads(json.dumps(BASE)) | {"method": method, "seed": seed}
    values = _override(values, changes)
    if method == "slca":
        values["options"].pop("lam", None)
    if method in ("seq_ft", "joint"):
        values["options"] = {}
    config = check(values)
    name = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]
    model = launch(config, out / f"{method}-{name}")
    rows = [row["accuracy"] for row in model.history]
    over_time = accuracies_over_time(rows, model.history[-1]["sizes"])
    seconds = sum(row["seconds"]["total"] for row in model.history)
    return {"last": over_time[-1], "inc": mean(over_time), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo_recipe"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1993])
    parser.add_argument("--methods", nargs="+", default=["slca", "coma", "cofima"])
    arguments = parser.parse_args()
    lines = [
        "# How the recipe of `cofima demo` was chosen",
        "",
        "One factor at a time around a middle setting, tested on a quarter of the training images that",
        "is held out; the test images were not looked at. Last-Acc in percent, mean over "
        f"{len(arguments.seeds)} seed(s) {arguments.seeds}.",
        "",
        f"    python benchmarks/demo_recipe.py --seeds {' '.join(map(str, arguments.seeds))}",
        "",
        "Middle setting:",
        "",
        *(f"    {line}" for line in yaml.safe_dump(BASE, sort_keys=False).splitlines()),
        "",
        "| changed | " + " | ".join(arguments.methods) + " |",
        "|---|" + "---|" * len(arguments.methods),
    ]
    for factor, settings in {"(middle)": [[]], **FACTORS}.items():
        for changes in settings:
            results = [
                mean(cell(method, changes, seed, arguments.out)["last"] for seed in arguments.seeds)
                for method in arguments.methods
            ]
            title = f"{factor}: " + ", ".join(f"`{c}`" for c in changes) if changes else factor
            lines.append(f"| {title} | " + " | ".join(f"{value:.1f}" for value in results) + " |")
            print(lines[-1], flush=True)
    (Path(__file__).parent / "DEMO_RECIPE.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
