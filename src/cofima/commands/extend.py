"""``cofima extend``: a model learns more, without the old photographs."""

from pathlib import Path
from typing import Annotated

import typer

from cofima.commands.console import errors, interruptible, out, progress, say
from cofima.commands.outcome import extended, losses
from cofima.generations import refuse_other
from cofima.lock import alone
from cofima.serve.check import ForgettingError
from cofima.serve.classifier import load

BUDGET_BROKEN = 3


def extend(
    model: Annotated[Path, typer.Argument(help="A model folder, of cofima learn or cofima run.")],
    photos: Annotated[Path, typer.Argument(help="A folder per class, or a CSV file (path,label).")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[train.KEY=VALUE]...", help="What differs in training this time."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write another model folder; MODEL stays as it is.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Images of old classes on which to measure what they lose.")
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(help="Points that old classes may lose on average; more keeps the old model, exit 3."),
    ] = None,
    keep_images: Annotated[
        int | None, typer.Option(min=0, help="Held-out images of each class to keep; as before by default.")
    ] = None,
    only_new: Annotated[
        bool, typer.Option("--only-new", help="Refuse classes that are known already.")
    ] = False,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the images, at most.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave unreadable images out.")] = False,
) -> None:
    """Teach a model new classes, or more images of known ones; the old images are not needed.

    The old model stays in force until the new one is complete, and cofima undo brings it back.
    """
    classifier = load(model, progress=progress())
    if folder is not None:
        refuse_other(folder, classifier.generation)
    with alone(folder or model), interruptible("the model is as it was; run the same command again"):
        refuse_other(folder or model, classifier.generation)
        try:
            outcome = classifier.extend(
                photos,
                check=check,
                max_drop=max_drop,
                keep_images=keep_images,
                only_new=only_new,
                skip_bad=skip_bad,
                epochs=epochs,
                settings=settings or [],
                progress=progress(),
            )
        except ForgettingError as error:
            out.print(losses(error.comparison))
            errors.print(f"cofima: {error}", highlight=False, markup=False, soft_wrap=True)
            raise typer.Exit(BUDGET_BROKEN) from None
        classifier.save(folder or model, progress())
    if outcome.old is not None and outcome.old.measured:
        out.print(losses(outcome.old))
    for line in extended(classifier, outcome):
        say(line)
    if max_drop is not None and (outcome.old is None or not outcome.old.measured):
        errors.print(
            "warning: --max-drop was not checked: there are no images of old classes. "
            "Give --check FOLDER, or learn with --keep-images",
            style="yellow",
            highlight=False,
        )
