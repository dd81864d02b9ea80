"""Search for the settings of the desk, and for where averaging helps, on held-out training images.

One factor at a time, seed 1993, a fifth of each class's training images held out; the test images are not
looked at. Run it again to continue; results are kept in desk_search.jsonl, and it writes DESK_SEARCH.md:

    COFIMA_DATA=/where/caltech101/is python benchmarks/desk_search.py [--jobs 2] [--table]
"""

import argparse
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "desk_search.jsonl"
BASE: dict[str, Any] = {
    "dataset": "folder:caltech101",
    "backbone": "vit_micro",
    "val_fraction": 0.2,
    "stream": {"base_classes": 11, "increment": 10},
    "train": {"epochs": 3, "batch_size": 16, "lr": 0.01, "backbone_lr_scale": 0.03},
}
ALIGN = {"align": {"epochs": 20, "temperature": 0.3}}
ALIGNED = ("slca", "coma", "cofima", "ema", "wise_ft", "weight_ensemble")
COLD = ["options.align.temperature=0.1"]
FAST = ["train.backbone_lr_scale=0.3"]
MIDDLE = ["train.backbone_lr_scale=0.03"]
SLOW = ["train.backbone_lr_scale=0.1"]
MEMORY = ["options.memory_size=505"]
LITE = ["backbone=tf_efficientnet_lite0", "model.img_size=96", "train.batchnorm=frozen"]
LITE_ALIGN = [*LITE, "options.align.epochs=5", *COLD]
PLAN: list[tuple[list[str], list[str]]] = [
    ([], ["slca", "l2p", "dual_prompt"]),
    *(([f"train.backbone_lr_scale={scale}"], ["slca"]) for scale in (0.0, 0.01, 0.1, 0.3)),
    *(([f"options.align.temperature={value}"], ["slca"]) for value in (0.05, 0.1, 1.0)),
    (["options.align.epochs=60"], ["slca"]),
    ([*COLD, "train.lr=0.03"], ["slca"]),
    ([*COLD, *SLOW], ["slca", "coma", "cofima"]),
    ([*COLD, *FAST], ["slca", "coma", "cofima", "weight_ensemble", "wise_ft"]),
    ([*COLD, *FAST, "options.lam=0.2"], ["coma", "cofima"]),
    ([*COLD, *FAST, "options.lam=0.1"], ["coma", "cofima"]),
    ([*COLD, *FAST, "options.lam=auto"], ["coma", "cofima"]),
    ([*COLD, *FAST, "options.lam=0.2", "options.fisher.norm=mean"], ["cofima"]),
    ([*COLD, *FAST, "options.lam=0.1", "options.fisher.norm=mean"], ["cofima"]),
    ([*COLD, *FAST, "options.lam=0.2", "options.fisher_history=accumulate"], ["cofima"]),
    ([*COLD, *FAST, "options.lam=0.2", "options.fisher.logits=local"], ["cofima"]),
    ([*COLD, *FAST, "options.lam=0.2", "options.variant=authors"], ["cofima"]),
    ([*COLD, *FAST, "options.lam=0.2", "train.epochs=6"], ["coma", "cofima"]),
    ([*COLD, *FAST, "train.epochs=6"], ["slca"]),
    ([*FAST, "options.lam=0.2", "options.align.epochs=0"], ["coma", "cofima"]),
    ([*FAST, "options.align.epochs=0"], ["slca"]),
    ([*COLD, *FAST, "options.init=previous"], ["weight_ensemble"]),
    ([*COLD, *FAST, "options.decay=0.97"], ["ema"]),
    (SLOW, ["seq_ft", "lwf"]),
    (FAST, ["seq_ft"]),
    ([*SLOW, "options.lamb=100"], ["ewc"]),
    *(
        (["train.epochs=8", f"train.backbone_lr_scale={scale}", "train.milestones=[6]"], ["joint"])
        for scale in (0.1, 1.0)
    ),
    ([*FAST, "train.epochs=16", "train.milestones=[12]"], ["joint"]),
    ([*MEMORY, *FAST], ["bic", "der_pp"]),
    ([*MEMORY, *MIDDLE], ["der_pp"]),
    ([*MEMORY, *FAST, "train.epochs=6"], ["gdumb"]),
    (["options.lr=0.3"], ["l2p", "dual_prompt"]),
    (["options.projection=2000"], ["ranpac"]),
    (["options.projection=2000", "options.petl=none"], ["ranpac"]),
    # a share of the way, not lam, is what CoMA and CoFiMA should be compared at
    ([*COLD, *FAST, "options.lam=0.05"], ["cofima"]),
    ([*COLD, "train.backbone_lr_scale=0.0"], ["slca"]),
    # every method at two or three settings, so that the table compares what was tuned alike
    ([*COLD, *SLOW], ["weight_ensemble", "wise_ft"]),
    ([*COLD, *SLOW, "options.decay=0.97"], ["ema"]),
    ([*COLD, *FAST, "options.lam=0.2"], ["wise_ft"]),
    ([*COLD, *FAST, "options.decay=0.99"], ["ema"]),
    (MIDDLE, ["seq_ft", "lwf"]),
    (FAST, ["lwf"]),
    ([*MIDDLE, "options.lamb=100"], ["ewc"]),
    ([*SLOW, "options.lamb=10000"], ["ewc"]),
    ([*MEMORY, *SLOW], ["bic", "der_pp"]),
    ([*MEMORY, *MIDDLE], ["bic"]),
    ([*MEMORY, *SLOW, "train.epochs=6"], ["gdumb"]),
    ([*MEMORY, *FAST, "train.epochs=12"], ["gdumb"]),
    (["options.lr=0.1"], ["l2p", "dual_prompt"]),
    ([*LITE, "options.petl=none", "options.projection=2000"], ["ranpac"]),
    ([*LITE_ALIGN, "train.backbone_lr_scale=0.0"], ["slca"]),
    ([*LITE_ALIGN, "train.backbone_lr_scale=0.01"], ["slca"]),
    ([*LITE_ALIGN, *SLOW], ["slca"]),
    ([*LITE_ALIGN, *SLOW, "options.lam=0.2"], ["coma", "cofima"]),
    ([*LITE_ALIGN, *FAST, "options.lam=0.2"], ["coma"]),
    # at like shares of the way, and at a rate between
    ([*LITE_ALIGN, *SLOW, "options.lam=0.4"], ["coma"]),
    ([*LITE_ALIGN, *SLOW, "options.lam=0.1"], ["coma"]),
    ([*LITE_ALIGN, *SLOW, "options.lam=0.08"], ["cofima"]),
    ([*LITE_ALIGN, *MIDDLE, "options.lam=0.2"], ["coma", "cofima"]),
    ([*LITE_ALIGN, *MIDDLE], ["slca"]),
    ([*LITE_ALIGN, "train.backbone_lr_scale=0.01", "options.lam=0.2"], ["coma", "cofima"]),
    # DER++ is below Seq FT at every rate: does it replay too little?
    ([*MEMORY, *MIDDLE, "options.alpha=1.0"], ["der_pp"]),
    ([*MEMORY, *MIDDLE, "options.beta=2.0"], ["der_pp"]),
    ([*LITE, *MIDDLE], ["seq_ft"]),
    ([*LITE, *SLOW, "train.epochs=5", "train.milestones=[4]"], ["joint"]),
]


def cell(method: str, changes: list[str]) -> dict[str, Any]:
    """Learn one setting."""
    import torch

    from cofima.experiment.config import resolve
    from cofima.experiment.launch import launch
    from cofima.report.metrics import forgetting, incremental, last

    torch.set_num_threads(1)
    values = BASE | {"method": method, "options": ALIGN if method in ALIGNED else {}}
    with tempfile.TemporaryDirectory() as folder:
        rows = launch(resolve(values, changes, "this setting"), Path(folder)).history
    matrix, sizes = [row.measured for row in rows], rows[-1].sizes
    drop = forgetting(matrix)
    return {
        "method": method,
        "changes": changes,
        "last": round(last(matrix, sizes), 2),
        "inc": round(incremental(matrix, sizes), 2),
        "forgetting": None if drop is None else round(drop, 2),
        "moved": [[row.distance.trained, row.distance.merged] for row in rows[1:]],
    }


def known() -> dict[str, dict[str, Any]]:
    """Return what has been measured, by setting."""
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    return {key(found["method"], found["changes"]): found for found in map(json.loads, lines)}


def key(method: str, changes: list[str]) -> str:
    return json.dumps([method, sorted(changes)])


def share(found: dict[str, Any]) -> str:
    """Return which share of the way that training went was kept, in the mean over tasks."""
    shares = [merged / trained for trained, merged in found.get("moved") or [] if trained]
    return f"{sum(shares) / len(shares):.2f}" if shares and max(shares) < 0.999 else "–"


def page() -> str:
    """Return DESK_SEARCH.md: the table below what it says of itself."""
    results = known()
    lines = [
        "| method | changed | Last-Acc | Inc-Acc | Forgetting | share kept |",
        "|---|---|---|---|---|---|",
    ]
    for changes, methods in PLAN:
        for method in methods:
            found = results.get(key(method, changes))
            if found is None:
                continue
            what = ", ".join(f"`{change}`" for change in changes) or "(middle)"
            over_time = method != "joint"
            numbers = [
                found["last"],
                found["inc"] if over_time else "–",
                found["forgetting"] if over_time else "–",
            ]
            lines.append(f"| {method} | {what} | {' | '.join(map(str, numbers))} | {share(found)} |")
    return (HERE / "desk_search.head.md").read_text("utf-8") + "\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="run nothing; write the page")
    arguments = parser.parse_args()
    done = known()
    todo = [(m, c) for c, methods in PLAN for m in methods if key(m, c) not in done]
    if not arguments.table:
        with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
            for future in as_completed([pool.submit(cell, *one) for one in todo]):
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(future.result()) + "\n")
                print(future.result(), flush=True)
    (HERE / "DESK_SEARCH.md").write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
