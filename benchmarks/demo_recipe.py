"""Search for the recipes digits.yaml and demo.yaml: one factor at a time, on held-out training images.

Run it again to continue; it writes the table of one of them into benchmarks/DEMO_RECIPE.md:

    python benchmarks/demo_recipe.py demo [--out runs/demo_recipe] [--seeds 1993 1996 1997]
"""

import argparse
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml

from cofima.experiment.config import check, override
from cofima.experiment.launch import launch
from cofima.report.metrics import incremental, last

BASE: dict[str, Any] = {
    "dataset": "digits",
    "backbone": "vit_micro",
    "val_fraction": 0.25,
    "stream": {"base_classes": 2, "increment": 2},
    "train": {"epochs": 2, "batch_size": 32, "lr": 0.01, "backbone_lr_scale": 0.01},
    "options": {"align": {"epochs": 150, "temperature": 1.0}},
}
CONTINUAL = ["slca", "coma", "cofima"]
SHORT = ["options.align.temperature=0.3", "options.align.epochs=50"]
SOLVED = ["options.classifier=lda", "options.drift=linear", "train.head_init=lda"]
JOINT = ["train.backbone_lr_scale=0.3", "train.batch_size=16"]
FACTORS: list[tuple[list[str], list[str]]] = [
    ([], ["joint", "seq_ft", *CONTINUAL]),
    (["train.batch_size=128", "options.align={}"], CONTINUAL),  # the paper's values, but for the epochs
    *(([f"train.backbone_lr_scale={value}"], CONTINUAL) for value in (0.0, 0.003, 0.03)),
    *(([f"options.lam={value}"], ["coma", "cofima"]) for value in (0.2, 0.6, "auto")),
    (["options.fisher_history=accumulate"], ["cofima"]),
    (["options.variant=authors"], ["cofima"]),
    *(([f"train.backbone_lr_scale={value}", "train.batch_size=16"], ["joint"]) for value in (0.1, 0.3, 1.0)),
    *(([*JOINT, f"train.epochs={value}"], ["joint"]) for value in (3, 4)),
    *(([*JOINT, f"train.epochs={value}", f"train.milestones=[{value - 1}]"], ["joint"]) for value in (3, 4)),
    *(([f"train.epochs={value}"], CONTINUAL) for value in (1, 3)),
    (["train.batch_size=64"], CONTINUAL),
    (["options.align.temperature=0.3"], CONTINUAL),
    (["options.align.temperature=0.3", "options.lam=0.2"], ["coma", "cofima"]),
    (["options.align.temperature=0.3", "options.align.epochs=50", "options.lam=0.2"], ["coma", "cofima"]),
    ([*SHORT, "data.max_train_per_class=60"], ["slca"]),
    ([*SHORT, "options.lam=0.2", "data.max_train_per_class=60"], ["coma", "cofima"]),
    (["options.align.temperature=0.3", "data.max_train_per_class=80"], ["slca"]),
    (["options.align.temperature=0.3", "options.lam=0.2", "data.max_train_per_class=80"], ["coma", "cofima"]),
    (["data.max_train_per_class=80"], ["seq_ft"]),
    ([*JOINT, "train.epochs=4", "data.max_train_per_class=60"], ["joint"]),
    ([*JOINT, "train.epochs=4", "data.max_train_per_class=80"], ["joint"]),
    ([*JOINT, "train.epochs=3", "train.milestones=[2]", "data.max_train_per_class=80"], ["joint"]),
    (["options.align.temperature=0.3", "data.max_train_per_class=80", "train.batch_size=24"], ["slca"]),
    (
        [
            "options.align.temperature=0.3",
            "options.lam=0.2",
            "data.max_train_per_class=80",
            "train.batch_size=24",
        ],
        ["coma", "cofima"],
    ),
    (["data.max_train_per_class=80", "train.batch_size=24"], ["seq_ft"]),
    ([*JOINT, "train.epochs=4", "train.milestones=[3]", "data.max_train_per_class=80"], ["joint"]),
]
DEMO_BASE: dict[str, Any] = BASE | {
    "data": {"max_train_per_class": 80},
    "model": {"img_size": 32},
    "train": BASE["train"] | {"batch_size": 24},
    "options": {"lam": 0.2, "align": {"epochs": 150, "temperature": 0.3}},
}
DEMO_FACTORS: list[tuple[list[str], list[str]]] = [
    ([], ["seq_ft", *CONTINUAL]),
    (["model.img_size=48"], ["slca", "coma"]),
    (["train.backbone_lr_scale=0.015"], CONTINUAL),
    (["train.backbone_lr_scale=0.02"], ["seq_ft", *CONTINUAL]),
    (["train.backbone_lr_scale=0.02", "options.align.samples_per_class=64"], CONTINUAL),
    (["train.backbone_lr_scale=0.02", "train.head_init=lda"], ["seq_ft", *CONTINUAL]),
    (["train.backbone_lr_scale=0.02", *SOLVED], CONTINUAL),
    (["train.backbone_lr_scale=0.02", *SOLVED, "options.closed_form.features=power"], CONTINUAL),
    (["train.backbone_lr_scale=0.02", *SOLVED, "model.layers=all"], CONTINUAL),
    (["train.backbone_lr_scale=0.0", *SOLVED, "model.layers=all"], ["coma"]),
    ([*JOINT, "train.epochs=4", "train.milestones=[3]"], ["joint"]),
]
HEAD = """

One factor at a time around a middle setting, evaluated on a held-out quarter of the training images,
not on test images (the test results that were seen are listed below). Last-Acc / Inc-Acc
in percent, mean over the seeds {seeds}. A dash means that the
setting does not apply to the method, or was not tried with it.

    python benchmarks/demo_recipe.py {recipe} --seeds {seeds}

Middle setting (everything else is the package's default, which is the paper's):

{base}

"""
FOOT = """
The choices, and why:

- The alignment needs a larger temperature and more epochs than the paper's: an epoch has as many steps as
  there are classes, and here there are 4 to 10, not 100. With the paper's values no method exceeds 33 %.
- The backbone learns at the paper's ratio (0.01). Well below it every method does about as well as the frozen
  network; above it the features drift away from the stored Gaussians, and averaging recovers
  only a part. At 0.01 the drift costs SLCA several points, and averaging recovers them.
- `lam=0.2`: the best of those tried for CoFiMA; the paper's 0.4 is for large tasks.
- Joint has nothing to forget. It gets the learning rate and the epochs that suit it, for an honest upper
  bound.
- The last four rows are the recipe: 80 images per class keep the demo short, batches of 24 keep enough steps.

Read the demo's gaps with this in mind. A frozen backbone does as well as the recipe: the demo shows that
averaging recovers the cost of drift, not that it beats a frozen backbone. One seed was used. A few settings
with 50 images per class were tried first, to find the middle setting, and are not in the table. The
size of the demo was not chosen blindly: the demo itself was run with 100 images in batches of 32 (too
slow; SLCA 84.7, CoMA 94.4, CoFiMA 94.7 on the test images) and with 80 in batches of 32
(93.9, 93.6, 93.6: too few steps to drift) before 80 in batches of 24, so its test results were seen when that
choice was made.
"""
DEMO_FOOT = """
The choices, and why:

- Images of 32 pixels: the scans have 8 x 8, and a fourth of the patches is a fourth of the work. The
  backbone's position embeddings are resampled.
- The backbone learns at 0.02 of the head's rate, twice the paper's: with fewer patches it drifts less. This
  costs SLCA ten points, a visible gap, and the averages almost nothing. It is not the best setting for SLCA,
  which drifts least where the backbone learns least. Faster was not tried.
- Sampling fewer features for the alignment is faster, but costs the averages some points: all 256 are
  sampled.
- A discriminant as the head, drift and rows that begin as a discriminant end a point higher, with the
  features of all layers three points higher and level with Joint, but all three methods at the same
  accuracy, and a frozen backbone as well: hardly anything drifts, so averaging has nothing to recover. The
  demo shows the methods as in their papers, and their differences; at its end it names the command for
  these options.
- Joint uses the settings of 64 pixels.

One seed was used, and a frozen backbone was tried only with the features of all layers; at 64 pixels it did
as well as the averages.
The demo was run once with 0.015 and 64 sampled features (SLCA 84.1, CoMA 90.8, CoFiMA 90.5 on the test
images) before all rows were complete.
"""


@dataclass(frozen=True)
class Search:
    """The settings that were tried for a recipe, and what is said above and below their table."""

    title: str
    base: dict[str, Any]
    factors: list[tuple[list[str], list[str]]]
    foot: str


SEARCHES = {
    "digits": Search("## `digits.yaml`", BASE, FACTORS, FOOT),
    "demo": Search("## `demo.yaml`", DEMO_BASE, DEMO_FACTORS, DEMO_FOOT),
}


def cell(base: dict[str, Any], method: str, changes: list[str], seed: int, out: Path) -> tuple[float, float]:
    """Learn one setting, or read what it gave before; return Last-Acc and Inc-Acc."""
    values = json.loads(json.dumps(base)) | {"method": method, "seed": seed}
    values = override(values, changes)
    if method in ("seq_ft", "joint"):
        values["options"] = {}
    if method == "slca":
        values["options"].pop("lam", None)
    config = check(values)
    name = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]
    history = launch(config, out / f"{method}-{name}").history
    matrix, sizes = [row.measured for row in history], history[-1].sizes
    return last(matrix, sizes), incremental(matrix, sizes)


def row(
    base: dict[str, Any],
    changes: list[str],
    chosen: list[str],
    columns: list[str],
    seeds: list[int],
    out: Path,
) -> str:
    """Return a line of the table."""
    cells = []
    for method in columns:
        if method not in chosen:
            cells.append("–")
            continue
        found = [cell(base, method, changes, seed, out) for seed in seeds]
        first, second = (mean(values) for values in zip(*found, strict=True))
        cells.append(f"{first:.1f}" if method == "joint" else f"{first:.1f} / {second:.1f}")
    what = ", ".join(f"`{change}`" for change in changes) or "(middle)"
    return f"| {what} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=SEARCHES)
    parser.add_argument("--out", type=Path, default=Path("runs/demo_recipe"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1993])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    search = SEARCHES[arguments.recipe]
    columns = ["joint", "seq_ft", *CONTINUAL]
    base = "\n".join(f"    {line}" for line in yaml.safe_dump(search.base, sort_keys=False).splitlines())
    seeds = " ".join(map(str, arguments.seeds))
    lines = [search.title + HEAD.format(seeds=seeds, base=base, recipe=arguments.recipe)]
    lines.append("| changed | " + " | ".join(columns) + " |")
    lines.append("|---|" + "---|" * len(columns))
    for changes, chosen in search.factors:
        lines.append(row(search.base, changes, chosen, columns, arguments.seeds, arguments.out))
        print(lines[-1], flush=True)
    page = Path(__file__).parent / "DEMO_RECIPE.md"
    parts = re.split(r"(?m)^(?=## )", page.read_text("utf-8"))
    mine = "\n".join(lines) + "\n" + search.foot + "\n"
    page.write_text(
        "".join(mine if p.startswith(search.title) else p for p in parts).rstrip() + "\n", "utf-8"
    )


if __name__ == "__main__":
    main()
