"""``cofima fisher``: which weights of a model matter, measured on images."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cofima import merging
from cofima.commands.console import progress, say


class LabelChoice(StrEnum):
    """Which labels the Fisher information is taken over."""

    data = "data"
    sampled = "sampled"
    exact = "exact"


class LogitChoice(StrEnum):
    """Which classes compete."""

    seen = "seen"
    local = "local"


def fisher(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    images: Annotated[
        Path, typer.Argument(help="Images: a folder per class, named as in the model, or a CSV file.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The .safetensors file to write.")],
    labels: Annotated[
        LabelChoice, typer.Option(help="The folder's classes, one drawn from the model, or the expectation.")
    ] = LabelChoice.data,
    logits: Annotated[
        LogitChoice, typer.Option(help="Softmax over all classes of the model, or over the folder's.")
    ] = LogitChoice.seen,
    limit: Annotated[int | None, typer.Option(help="At most so many images of each class.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out unreadable images.")] = False,
    seed: Annotated[int, typer.Option(help="Of sampled labels, and of the images that a limit takes.")] = 0,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda.")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Measure the diagonal Fisher information of a model, for a merge weighted by it."""
    done = merging.fisher(
        model,
        images,
        out,
        labels=labels.value,
        logits=logits.value,
        limit=limit,
        skip_bad=skip_bad,
        seed=seed,
        device=device,
        force=force,
        progress=progress(),
    )
    say(f"Wrote {done.path}: {done.images} images of {done.classes} class{'es' if done.classes > 1 else ''}")
