"""What learning and extending came to, in a few lines."""

import shlex
from collections.abc import Iterator

from rich.table import Table

from cofima.serve.check import Comparison
from cofima.serve.classifier import Classifier
from cofima.serve.extend import Extension

WORST = 3


def learned(made: Classifier) -> Iterator[str]:
    """Say what a classifier learned, how good it is, what that rests on, and what to do next."""
    row, accuracy = made.history[-1], made.accuracy
    yield f"Learned {count(len(made.classes), 'class', 'es')} from {count(row.train_images or 0, 'image')}"
    yield f"  in {duration(row.seconds['total'])}: {made.model.method.label} on {made.model.backbone.name}"
    if accuracy is None or accuracy.percent is None:
        yield "Accuracy: unknown; no class has five images or more, so none were held out"
    else:
        yield (
            f"Accuracy: {accuracy.percent:.1f} % on {count(row.held_out or 0, 'held-out image')}, which also "
            "decided when to stop"
        )
        yield from worst(accuracy.by_class)
    yield from kept(made)
    where = shlex.quote(str(made.folder))
    yield "Try next:"
    yield f"  cofima predict {where} PHOTO.jpg"
    yield f"  cofima extend {where} MORE_PHOTOS"


def extended(made: Classifier, outcome: Extension) -> Iterator[str]:
    """Say what an extension came to."""
    if outcome.new:
        yield f"Learned {count(len(outcome.new), 'new class', 'es')}: {some(outcome.new)}"
    if outcome.more:
        yield f"Learned more images of known classes (a domain change): {some(outcome.more)}"
    seconds = sum(row.seconds["total"] for row in outcome.rows)
    yield f"  from {count(outcome.train_images, 'image')} in {duration(seconds)}"
    if outcome.accuracy.percent is None:
        yield "Accuracy on these: unknown; no images were held out"
    else:
        images = sum(outcome.accuracy.images.values())
        yield f"Accuracy on these: {outcome.accuracy.percent:.1f} % on {count(images, 'held-out image')}"
        yield from worst(outcome.accuracy.by_class)
    yield from lost(outcome.old)
    yield from kept(made)


def lost(old: Comparison | None) -> Iterator[str]:
    """Say what old classes lost, and how surely that is known."""
    if old is None:
        yield "Old classes: unknown; give --check FOLDER with images of them"
        return
    before, after = old.before.mean_of_classes, old.after.mean_of_classes
    sure = "" if old.measured else ", an estimate"
    yield f"Old classes: {before:.1f} % before, {after:.1f} % after{sure} ({old.rests_on})"


def losses(old: Comparison) -> Table:
    """Return the accuracy of each old class before and after, greatest loss first."""
    table = Table("class", "images", "before %", "after %", "change")
    before, after = old.before.by_class, old.after.by_class
    for name in sorted(before, key=lambda name: after[name] - before[name]):
        change = after[name] - before[name]
        images = str(old.before.images[name])
        table.add_row(name, images, f"{before[name]:.1f}", f"{after[name]:.1f}", f"{change:+.1f}")
    return table


def worst(by_class: dict[str, float]) -> Iterator[str]:
    """Name the classes that are known least."""
    low = sorted(by_class, key=lambda name: by_class[name])[:WORST]
    yield "  least known: " + ", ".join(f"{name} {by_class[name]:.0f} %" for name in low)


def kept(made: Classifier) -> Iterator[str]:
    """Say where the model is, how large, and which images are in it."""
    assert made.folder is not None
    assert made.generation is not None
    size = sum(file.stat().st_size for file in made.generation.iterdir())
    yield f"Model: {made.folder} ({size / 1e6:.1f} MB)"
    held = 0 if made.model.images is None else len(made.model.images)
    if held:
        yield f"  {count(held, 'held-out image')} kept in it, to measure what later extensions lose"
    if made.model.method.keeps_images:
        yield f"  {made.model.method.label} keeps images that it learned from in it"


def count(number: int, noun: str, plural: str = "s") -> str:
    """Say a number of things."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def some(names: list[str], most: int = 8) -> str:
    """Name some of them, and say how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def duration(seconds: float) -> str:
    """Say a time as a person would."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
