"""``cofima evaluate``: how good a model is on labelled images."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cofima.commands.console import interruptible, out, progress, say
from cofima.serve.classifier import load
from cofima.serve.evaluation import Evaluation

SHOWN = 10


def evaluate(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    photos: Annotated[Path, typer.Argument(help="A folder per class, or a CSV file (path,label).")],
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where a page, a figure and tables go, if they should.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave unreadable images out.")] = False,
) -> None:
    """Measure accuracy on labelled images, class by class, and show what is confused with what."""
    classifier = load(model, progress=progress())
    with interruptible("nothing was written"):
        found = classifier.evaluate(photos, skip_bad=skip_bad, progress=progress())
    print_evaluation(found)
    if folder is not None:
        from cofima.serve.page import write  # figures take a second to import

        for path in write(found, folder):
            say(f"Wrote {path}")


def print_evaluation(found: Evaluation) -> None:
    """Print the accuracy, the classes known least, and the pairs most confused."""
    say(f"Accuracy: {found.accuracy.percent:.1f} % on {found.images:,} images of {found.source}")
    say(f"Mean over classes: {found.accuracy.mean_of_classes:.1f} %")
    say(f"Probabilities are off by {found.calibration:.1f} points on average")
    by_class = found.accuracy.by_class
    table = Table("class", "images", "accuracy %", title="Known least", title_justify="left")
    for name in sorted(by_class, key=lambda name: by_class[name])[:SHOWN]:
        table.add_row(name, str(found.accuracy.images[name]), f"{by_class[name]:.1f}")
    out.print(table)
    if found.confused:
        pairs = Table("class", "taken for", "images", title="Most confused", title_justify="left")
        for true, said, images in found.confused[:SHOWN]:
            pairs.add_row(true, said, str(images))
        out.print(pairs)
