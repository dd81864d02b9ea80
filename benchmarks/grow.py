"""Grow classifiers of photographs as a user would, class by class: writes benchmarks/GROW.md.

Subsets of 15 classes are drawn from the folders caltech101, cifar100, cub200 and cars196 below COFIMA_DATA.
Nine classes are learned, then three more at once, then three one by one, without the old photographs.
Beside it stand classifiers on the same frozen features, trained on all photographs seen so far. What is
measured goes into benchmarks/grow.jsonl, one line a step; run it again to continue:

    COFIMA_DATA=/where/they/are python benchmarks/grow.py [--only caltech101] [--seeds 3] [--slow] [--layers]
"""

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler, normalize

import cofima
from cofima.classifier.classifier import Classifier
from cofima.classifier.evaluate import calibration_error
from cofima.classifier.scoring import features_of, logits_of, read_known, to_probabilities
from cofima.core.progress import SILENT
from cofima.core.seeds import Seeds
from cofima.data.image_set import ImageSet
from cofima.methods.components.closed_form import ClosedFormOptions, RidgeReadout

HERE = Path(__file__).parent

RESULTS, PAGE, HEAD = HERE / "grow.jsonl", HERE / "GROW.md", HERE / "grow.head.md"
SUBSETS = (
    ("caltech101", 96, 0),
    ("cub200", 96, 0),
    ("cars196", 96, 0),
    ("cifar100", 96, 0),
    ("cub200", 96, 1),
    ("cars196", 96, 1),
    ("caltech101", 224, 0),
)
STEPS = (9, 3, 1, 1, 1)
METHODS = ("cofima", "ranpac", "prototype")
LAYERED = ("cofima all", "cofima balanced")  # the default with model.layers
FLOOR = 1000  # draws of labels for the noise floor of the calibration error


def steps_of(root: Path, subset: int, seed: int) -> list[list[str]]:
    """Return the classes of each step, drawn by the subset and the seed."""
    names = sorted(path.name for path in (root / "train").iterdir())
    chosen = random.Random(f"{root.name} {subset} {seed}").sample(names, sum(STEPS))
    parts, start = [], 0
    for size in STEPS:
        parts.append(chosen[start : start + size])
        start += size
    return parts


def flat(parts: Iterable[Iterable[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))


def folder_of(place: Path, root: Path, part: str, names: list[str]) -> Path:
    """Make a folder with links to the photographs of some classes."""
    place.mkdir(parents=True)
    for name in names:
        (place / name).symlink_to((root / part / name).resolve(), target_is_directory=True)
    return place


def grow(name: str, size: int, subset: int, seed: int, method: str, fast: bool) -> Iterator[dict[str, Any]]:
    """Learn a subset step by step, and yield what each step measured."""
    root = Path(os.environ["COFIMA_DATA"]) / name
    parts = steps_of(root, subset, seed)
    with TemporaryDirectory() as temporary:
        here = Path(temporary)
        clf: Classifier | None = None
        before: dict[str, float] = {}
        for number, names in enumerate(parts):
            photos = folder_of(here / f"train {number}", root, "train", names)
            test = folder_of(here / f"test {number}", root, "test", flat(parts[: number + 1]))
            start = time.perf_counter(), time.process_time()
            row: dict[str, Any] = {"set": name, "size": size, "subset": subset, "seed": seed}
            row |= {"method": method, "fast": fast, "step": number}
            if clf is None:
                settings, (named, _, layers) = [f"model.img_size={size}"], method.partition(" ")
                settings += [f"model.layers={layers}"] if layers else []
                given = {} if named == "cofima" else {"method": named}
                clf = cofima.learn(photos, settings=settings, seed=seed, fast=fast, **given)
            else:
                outcome = clf.extend(photos, fast=fast)
                row["drop"] = None if outcome.old is None else outcome.old.drop
                row["interval"] = None if outcome.old is None else outcome.old.interval
                row["unknown"] = outcome.unknown
            row |= {"seconds": time.perf_counter() - start[0], "cpu": time.process_time() - start[1]}
            found, chance, right = tested(clf, test)
            row |= {"accuracy": mean(found), "said": clf.accuracy and clf.accuracy.mean_of_classes}
            if before:
                row["true_drop"] = mean(before) - mean({k: v for k, v in found.items() if k in before})
            row |= {"chance": [round(p, 3) for p in chance], "right": [int(r) for r in right]}
            row["notes"] = clf.history[-1].notes[-1:]
            before = found
            yield row


def tested(clf: Classifier, test: Path) -> tuple[dict[str, float], list[float], list[bool]]:
    """Return the accuracy of each class, and the probability and correctness of each answer."""
    images = images_of(clf, test, "test")
    chance, answers = to_probabilities(clf.model, logits_of(clf.model, images)).max(1)
    right = answers == images.labels
    found = {
        clf.classes[label]: 100 * float(right[images.labels == label].double().mean())
        for label in torch.unique(images.labels).tolist()
    }
    return found, chance.tolist(), right.tolist()


def images_of(clf: Classifier, folder: Path, part: str) -> ImageSet:
    """Return the labeled images of a folder."""
    read = read_known(clf.model, folder, part, skip_unreadable=False, progress=SILENT)
    return read.images(clf.classes)


def mean(found: dict[str, float]) -> float:
    return sum(found.values()) / len(found)


def baselines(name: str, size: int, subset: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the accuracy of classifiers on frozen features, trained on all photographs seen so far."""
    root = Path(os.environ["COFIMA_DATA"]) / name
    parts = steps_of(root, subset, seed)
    names = flat(parts)
    with TemporaryDirectory() as temporary:
        here = Path(temporary)
        settings = [f"model.img_size={size}", "val_fraction=0"]
        everything = folder_of(here / "all", root, "train", names)
        clf = cofima.learn(everything, method="slda", settings=settings, seed=seed)
        data = {}
        for part in ("train", "test"):
            where = folder_of(here / part, root, part, names)
            images = images_of(clf, where, part)
            data[part] = features_of(clf.model, images).double().numpy(), images.labels.numpy()
        for number in range(len(STEPS)):
            seen = [clf.classes.index(one) for one in flat(parts[: number + 1])]
            (x, y), (z, w) = (
                (features[np.isin(labels, seen)], labels[np.isin(labels, seen)])
                for features, labels in data.values()
            )
            for kind, answers in rivals(x, y, z, seed):
                each = [100 * (answers[w == label] == label).mean() for label in seen]
                row = {"set": name, "size": size, "subset": subset, "seed": seed, "method": kind}
                yield row | {"fast": False, "step": number, "accuracy": float(np.mean(each))}


def rivals(x: Any, y: Any, z: Any, seed: int) -> Iterator[tuple[str, Any]]:
    """Yield the answers of nearest means, LDA, logistic regression and RanPAC's head."""
    classes = np.unique(y)
    means = np.stack([x[y == label].mean(0) for label in classes])
    yield "nearest mean", classes[(normalize(z) @ normalize(means).T).argmax(1)]
    equal = np.full(len(classes), 1 / len(classes))
    lda = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto", priors=equal)
    yield "LDA", lda.fit(x, y).predict(z)
    scaler = StandardScaler().fit(x)
    logistic = LogisticRegression(C=0.01, max_iter=1000)
    yield "logistic regression", logistic.fit(scaler.transform(x), y).predict(scaler.transform(z))
    readout = RidgeReadout(x.shape[1], ClosedFormOptions(projection=5000), Seeds(seed))
    places = torch.from_numpy(np.searchsorted(classes, y))
    readout.add(torch.from_numpy(x).float(), places, len(classes), 0)
    with torch.inference_mode():
        logits = readout.solved([len(classes)])(torch.from_numpy(z).float())
        yield "RanPAC", classes[logits.argmax(1).numpy()]


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()] if RESULTS.is_file() else []


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[part] for part in ("set", "size", "subset", "seed", "method", "fast"))


def measure(chosen: argparse.Namespace) -> None:
    """Measure what is not in the results yet, subset after subset."""
    done = {key(row) for row in read() if row["step"] == len(STEPS) - 1}
    for seed in range(chosen.seeds):
        for name, size, subset in SUBSETS:
            if chosen.only not in ("", name, f"{name}-{size}"):
                continue
            cells = [(method, True) for method in METHODS]
            cells += [("cofima", False), ("seq_ft", False)] if chosen.slow else []
            cells += [(method, True) for method in LAYERED] if chosen.layers else []
            for method, fast in cells:
                if (name, size, subset, seed, method, fast) not in done:
                    _write(list(grow(name, size, subset, seed, method, fast)))
            if (name, size, subset, seed, "LDA", False) not in done:
                _write(list(baselines(name, size, subset, seed)))


def _write(rows: list[dict[str, Any]]) -> None:
    with RESULTS.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    last = rows[-1]
    print(*key(last), f"{last['accuracy']:.1f}", flush=True)


def floor(chance: torch.Tensor) -> float:
    """Return the mean calibration error of labels drawn from the probabilities themselves."""
    generator = torch.Generator().manual_seed(0)
    draws = (torch.rand(FLOOR, len(chance), generator=generator) < chance for _ in range(1))
    return float(np.mean([calibration_error(chance, right) for right in next(draws)]))


def page() -> str:
    rows = read()
    lines = [HEAD.read_text("utf-8").rstrip() if HEAD.is_file() else ""]
    for more in ((), *((kind,) for kind in TRAINED), LAYERS):
        lines += summary(rows, (*FROZEN, *more))
    lines += ["\n## Accuracy, subset by subset\n", *accuracies(rows)]
    lines += ["\n## The loss of old classes, as it was reported\n", *losses(rows)]
    lines += ["\n## Probabilities\n", *calibrations(rows)]
    return "\n".join(lines) + "\n"


RIVALS = ("nearest mean", "LDA", "logistic regression", "RanPAC")


FROZEN = (("cofima", True), *((rival, False) for rival in RIVALS))
TRAINED = (("cofima", False), ("seq_ft", False))
LAYERS = tuple((method, True) for method in LAYERED)


def summary(rows: list[dict[str, Any]], kinds: tuple[tuple[str, bool], ...]) -> Iterator[str]:
    """Yield a table of means over all subsets and seeds that every one of the classifiers has grown."""
    found = {(cell(r), r["method"], r["fast"], r["step"]): r["accuracy"] for r in rows}
    last = len(STEPS) - 1
    cells = [c for c in dict.fromkeys(map(cell, rows)) if all((c, *kind, last) in found for kind in kinds)]
    if not cells:
        return
    values = {
        kind: np.array([[found[c, *kind, step] for step in (0, 1, last)] for c in cells]) for kind in kinds
    }
    ours = values[kinds[0]]
    sets = ", ".join(dict.fromkeys(f"{name} {size} px" for name, size, *_ in cells))
    yield f"\n## In one table: {len(cells)} subsets ({sets})\n"
    yield "| | 9 classes | +3 | +1+1+1 | `learn --fast` at the end, minus this one |"
    yield "|---|---|---|---|---|"
    for kind, value in values.items():
        apart = (ours - value)[:, 2]
        error = np.std(apart, ddof=1) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
        beside = "" if kind == kinds[0] else f"{apart.mean():+.1f} \u00b1 {error:.1f}"
        means = " | ".join(f"{one:.1f}" for one in value.mean(0))
        yield f"| {label(*kind)} | {means} | {beside} |"


def in_order(rows: Iterable[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Return the classifiers of some rows, ours first."""
    order = [("cofima", True), *LAYERS, ("cofima", False)]
    order += [("ranpac", True), ("prototype", True), ("seq_ft", False)]
    order += [(rival, False) for rival in RIVALS]
    return sorted({(r["method"], r["fast"]) for r in rows}, key=order.index)


def cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["set"], row["size"], row["subset"], row["seed"]


def accuracies(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a row for each subset: accuracy after nine, twelve and fifteen classes, mean over seeds."""
    yield "| set | px | subset | seeds | | 9 classes | +3 | +1+1+1 | CPU s (learn, +3, +1) |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, size, subset in SUBSETS:
        mine = [r for r in rows if (r["set"], r["size"], r["subset"]) == (name, size, subset)]
        for method, fast in in_order(mine):
            cell = [r for r in mine if (r["method"], r["fast"]) == (method, fast)]
            seeds = sorted({r["seed"] for r in cell})
            at = {step: [r for r in cell if r["step"] == step] for step in range(len(STEPS))}
            values = [f"{np.mean([r['accuracy'] for r in at[step]]):.1f}" for step in (0, 1, 4)]
            timed = (0, 1, 2) if "cpu" in cell[0] else ()
            times = ", ".join(f"{np.mean([r['cpu'] for r in at[step]]):.0f}" for step in timed)
            cells = [name, str(size), str(subset), str(len(seeds)), label(method, fast), *values, times]
            yield f"| {' | '.join(cells)} |"


def label(method: str, fast: bool) -> str:
    """Return a classifier's name in the tables: for ours, the command."""
    if method in RIVALS:
        return method
    if method in LAYERED:
        return f"`learn --fast model.layers={method.removeprefix('cofima ')}`"
    if method == "seq_ft":
        return "fine-tuning (`learn --method seq_ft`)"
    if method != "cofima":
        return f"`learn --method {method}`"
    return "`learn --fast`" if fast else "`learn`"


def losses(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield how far reported drops are from those on test images."""
    yield "| | steps | told | mean signed error | 90 % interval holds the drop on test images |"
    yield "|---|---|---|---|---|"
    for method, fast in in_order(r for r in rows if "true_drop" in r):
        mine = [r for r in rows if (r["method"], r["fast"]) == (method, fast) and "true_drop" in r]
        told = [r for r in mine if r["drop"] is not None]
        if told:
            error = np.mean([r["drop"] - r["true_drop"] for r in told])
            inside = np.mean([r["interval"][0] <= r["true_drop"] <= r["interval"][1] for r in told])
            cells = [label(method, fast), str(len(mine)), str(len(told)), f"{error:+.2f}"]
            yield f"| {' | '.join(cells)} | {100 * inside:.0f} % |"


def calibrations(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the calibration error after the last step, pooled over subsets, and its noise floor."""
    yield "| | images | calibration error | of labels drawn from the probabilities | difference |"
    yield "|---|---|---|---|---|"
    for method, fast in in_order(r for r in rows if "chance" in r):
        for step in (0, len(STEPS) - 1):
            mine = [r for r in rows if (r["method"], r["fast"], r["step"]) == (method, fast, step)]
            chance = torch.tensor(flat(r["chance"] for r in mine))
            right = torch.tensor(flat(r["right"] for r in mine), dtype=torch.bool)
            error, least = calibration_error(chance, right), floor(chance)
            after = f"{label(method, fast)}, {sum(STEPS[: step + 1])} classes"
            yield f"| {after} | {len(chance)} | {error:.1f} | {least:.1f} | {error - least:.1f} |"


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--only", default="", help="a set, or SET-SIZE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--slow", action="store_true", help="with fine-tuning too")
    parser.add_argument("--layers", action="store_true", help="with the features of all layers too")
    parser.add_argument("--collect", action="store_true", help="write the page only")
    chosen = parser.parse_args()
    if not chosen.collect:
        measure(chosen)
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
