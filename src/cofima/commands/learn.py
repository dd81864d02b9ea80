"""``cofima learn``: photographs become a model folder."""

from pathlib import Path
from typing import Annotated

import typer

from cofima.commands.console import interruptible, progress, say
from cofima.commands.outcome import learned
from cofima.serve.classifier import learn as learn_classifier


def learn(
    photos: Annotated[Path, typer.Argument(help="A folder per class, or a CSV file (path,label).")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="What differs from the recipe learn.yaml."),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--out", "-o", help="The model folder; it must not hold a model yet.")
    ] = Path("model"),
    backbone: Annotated[
        str | None,
        typer.Option(help="Pre-trained network; EfficientNet-Lite0 where installed, else vit_micro."),
    ] = None,
    method: Annotated[str | None, typer.Option(help="What learns; cofima if not given.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the images, at most.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides what is left to chance.")] = None,
    keep_images: Annotated[
        int, typer.Option(min=0, help="Held-out images of each class to keep in the model folder.")
    ] = 0,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave unreadable images out.")] = False,
) -> None:
    """Learn the classes of a folder of photographs; the model can be extended later without them.

    A part of each class is held out: it says how good the classifier is, calibrates its probabilities,
    and decides when to stop. Nothing is written before the model is complete.
    """
    with interruptible("nothing was written; run the same command again"):
        made = learn_classifier(
            photos,
            folder,
            backbone=backbone,
            method=method,
            epochs=epochs,
            seed=seed,
            keep_images=keep_images,
            skip_bad=skip_bad,
            settings=settings or [],
            progress=progress(),
        )
    for line in learned(made):
        say(line)
