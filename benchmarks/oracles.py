"""Oracle heads on the backbones of finished runs: the cost of the backbone, of stale statistics, of the head.

After the last task, the head of a run is replaced by heads that have seen the images of all tasks, which a
method without old images may not do. Each row is a backbone, each column a head on it. Of a run of
joint the column is that of the backbone which saw all images at once. What was measured is kept in
benchmarks/capped_oracles.jsonl, and capped.py makes tables of it:

    COFIMA_DATA=/where/they/are python benchmarks/oracles.py runs/capped/RUN ...
    python benchmarks/capped.py --collect
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from cofima.core.progress import SILENT
from cofima.experiment.stream import load_stream
from cofima.methods import Method
from cofima.methods.components.aligned import Aligned
from cofima.methods.components.alignment import align
from cofima.methods.components.closed_form import ClosedFormOptions, discriminant_head, shrink
from cofima.methods.components.discriminant import SharedGaussians, Space
from cofima.methods.components.gaussians import ClassGaussians, by_class
from cofima.report import runs
from cofima.store.config import Config
from cofima.store.model import load_model

RESULTS = Path(__file__).parent / "capped_oracles.jsonl"
HEADS = {
    "own": "as it was learned",
    "aligned": "aligned, true statistics",
    "lda": "discriminant, all images",
    "power": "the same, power-normalized",
    "logistic": "logistic regression, all images",
}


def measure(folder: Path) -> dict[str, Any]:
    """Return the accuracy of a finished run with its own head and with the others."""
    model = load_model(folder)
    run, method = runs.read(folder), model.method
    config = Config.model_validate(run.config)
    stream = load_stream(config, model.backbone, SILENT)
    with torch.inference_mode():
        train, test = (
            (
                torch.cat([method.features(getattr(task, part)) for task in stream]),
                torch.cat([getattr(task, part).labels for task in stream]),
            )
            for part in ("train", "test")
        )
    found = {
        name: 100 * float((answers == test[1]).double().mean())
        for name, answers in heads(method, train, test[0])
    }
    what = "held-out" if config.val_fraction else "test"
    kind = [method.classifier] if isinstance(method, Aligned) else []
    kind += [f"layers={config.model.layers}"] if config.model.layers != "last" else []
    label = f"{run.label} ({', '.join(kind)})" if kind else run.label
    about = {"dataset": config.dataset, "run": folder.name, "label": label, "seed": config.seed}
    return about | {"images": what, "count": len(test[1]), "accuracy": found}


def heads(method: Method, train: tuple[Tensor, Tensor], x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the answers of each head to the images of these features."""
    features, labels = train
    yield "own", answers(method.head(), x)
    mine = by_class(features, labels)
    if isinstance(method, Aligned) and method.classifier == "sgd":
        gaussians = ClassGaussians(shrink=method.align.shrink)
        for label in sorted(mine):
            gaussians.add(mine[label])
        last = len(method.net.head.sizes) - 1
        yield (
            "aligned",
            answers(align(method.net.head, gaussians, None, method.align, method.context, last), x),
        )
    spaces: dict[str, Space] = {"lda": "raw", "power": "power"}
    for name, space in spaces.items():
        shared, how = SharedGaussians(features.shape[1], space=space), ClosedFormOptions(features=space)
        for label in sorted(mine):
            shared.add(mine[label])
        shrink(shared, features, labels, how, "lda")
        yield name, answers(discriminant_head(shared, how, method.net.head.sizes), x)
    scaler = StandardScaler().fit(features.numpy())
    logistic = LogisticRegression(C=0.01, max_iter=1000).fit(
        scaler.transform(features.numpy()), labels.numpy()
    )
    yield "logistic", torch.from_numpy(logistic.predict(scaler.transform(x.numpy())))


@torch.inference_mode()
def answers(head: torch.nn.Module, x: Tensor) -> Tensor:
    found: Tensor = head(x).argmax(1)
    return found


def tables() -> Iterable[str]:
    """Yield a table for each dataset and kind of images: a row for each run, a column for each head."""
    rows = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()] if RESULTS.is_file() else []
    for dataset, images, count in dict.fromkeys((r["dataset"], r["images"], r["count"]) for r in rows):
        yield f"\n### {dataset.removeprefix('folder:')}, {count} {images} images\n"
        yield f"| Backbone | {' | '.join(HEADS.values())} |"
        yield "|---|" + "---|" * len(HEADS)
        for row in rows:
            if (row["dataset"], row["images"], row["count"]) == (dataset, images, count):
                found = row["accuracy"]
                cells = [f"{found[name]:.1f}" if name in found else "–" for name in HEADS]
                yield f"| {row['label']} | {' | '.join(cells)} |"


def main(folders: list[str]) -> None:
    known = RESULTS.read_text("utf-8") if RESULTS.is_file() else ""
    for folder in map(Path, folders):
        if f'"{folder.name}"' not in known:
            row = measure(folder)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print("\n".join(tables()))


if __name__ == "__main__":
    main(sys.argv[1:])
