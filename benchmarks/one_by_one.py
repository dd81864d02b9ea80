"""Accuracy of adding one class at a time, beside adding all at once.

Ten classes of Caltech-101 are learned, then ten more: all at once, or one by one in ten extensions.
`COFIMA_DATA=... python benchmarks/one_by_one.py` prints the accuracy over all twenty on the test images,
the mean over three seeds; each seed takes other classes. Options of `cofima learn` may be given.
"""

import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import cofima

BASE, MORE, SEEDS, SIZE = 10, 10, (0, 1, 2), 96
TARGET = 5.0


def main(settings: list[str]) -> None:
    """Measure, and print one line a seed and the means."""
    root = Path(os.environ.get("COFIMA_DATA", "../shared/data")) / "caltech101"
    if not root.is_dir():
        sys.exit(f"{root} is not there: give COFIMA_DATA, the folder that has caltech101/train and test")
    results = [measure(root, seed, [f"model.img_size={SIZE}", *settings]) for seed in SEEDS]
    print("\n| seed | ten at once | one by one | gap | new, at once | new, one by one |")
    print("|---|---|---|---|---|---|")
    for seed, (whole, single, new_whole, new_single) in zip(SEEDS, results, strict=True):
        gap = whole - single
        print(f"| {seed} | {whole:.1f} | {single:.1f} | {gap:.1f} | {new_whole:.1f} | {new_single:.1f} |")
    means = [statistics.mean(column) for column in zip(*results, strict=True)]
    gap = means[0] - means[1]
    verdict = "within" if gap <= TARGET else "NOT within"
    print(f"mean: {means[0]:.1f} at once, {means[1]:.1f} one by one: {gap:.1f} points, {verdict} {TARGET:g}")


def measure(root: Path, seed: int, settings: list[str]) -> tuple[float, float, float, float]:
    """Return the accuracy over all classes both ways, then that over the new classes."""
    names = sorted(folder.name for folder in (root / "train").iterdir())
    names = random.Random(seed).sample(names, BASE + MORE)
    base, more = names[:BASE], names[BASE:]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        cofima.learn(
            linked(root / "train", base, place / "base"), place / "model", seed=seed, settings=settings
        )
        whole, single = cofima.load(place / "model"), cofima.load(place / "model")
        whole.extend(linked(root / "train", more, place / "more"))
        for name in more:
            single.extend(linked(root / "train", [name], place / name))
        found = []
        for tested in (names, more):
            test = linked(root / "test", tested, place / f"test {len(tested)}")
            found += [clf.evaluate(test).accuracy.mean_of_classes for clf in (whole, single)]
    print(f"seed {seed}: {found[0]:.1f} at once, {found[1]:.1f} one by one", flush=True)
    return found[0], found[1], found[2], found[3]


def linked(source: Path, names: list[str], place: Path) -> Path:
    """Return a folder that has these classes of another, without copying an image."""
    place.mkdir()
    for name in names:
        (place / name).symlink_to((source / name).resolve())
    return place


if __name__ == "__main__":
    main(sys.argv[1:])
