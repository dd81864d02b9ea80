"""``cofima predict``: what is on these images."""

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cofima.commands.console import errors, interruptible, progress, say
from cofima.data.sources.listing import SUFFIXES
from cofima.errors import CofimaError, problems
from cofima.serve.classifier import load
from cofima.serve.predict import Prediction


def predict(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    images: Annotated[
        list[str], typer.Argument(help="Images, folders of images, or - for a list of paths on stdin.")
    ],
    top: Annotated[int, typer.Option(min=1, help="How many classes to name.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="A table: image, label, probability, ...")] = False,
    unknown: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Say 'unknown' where an image is farther from every class than all but this share of "
            "held-out images.",
        ),
    ] = None,
) -> None:
    """Name the classes of images, with probabilities calibrated on held-out images.

    Exit code 1 if some images could not be read, 2 if none could.
    """
    if as_json and as_csv:
        raise CofimaError("give --json or --csv, not both")
    paths = list(find(images))
    classifier = load(model, progress=progress())
    write = _json if as_json else _csv if as_csv else _plain
    readable = 0
    listener = progress() if sys.stdout.isatty() or not (as_json or as_csv) else None
    with interruptible("stopped"):
        found = classifier.stream(paths, top=top, unknown=unknown)
        if listener is not None and len(paths) > 100:
            found = listener.track(found, len(paths), "images")
        for number, answer in enumerate(found):
            write(answer, number == 0)
            readable += not answer.error
    if not classifier.calibrated and not (as_json or as_csv):
        errors.print("note: no images were held out, so the probabilities are not calibrated")
    if readable < len(paths):
        errors.print(f"cofima: {len(paths) - readable} of {len(paths)} images could not be read")
        raise typer.Exit(1 if readable else 2)


def find(given: list[str]) -> Iterator[Path]:
    """Yield the images that are given: files, those below folders, and a list on stdin for ``-``."""
    words = [w for word in given for w in (sys.stdin.read().splitlines() if word == "-" else [word]) if w]
    paths = [Path(word) for word in words]
    wrong = [f"{path}: no such file or folder" for path in paths if not path.exists()]
    if wrong and len(wrong) == len(paths):
        raise problems("the list of images", wrong[:20])
    none = True
    for path in paths:
        below = (
            sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
        )
        none = none and not below
        yield from below
    if none:
        raise CofimaError(f"no images in {', '.join(given)}")


def _plain(answer: Prediction, first: bool) -> None:
    if answer.error:
        say(f"{answer.image}: error: {answer.error}")
        return
    best = ", ".join(f"{name} {100 * p:.1f} %" for name, p in answer.best)
    say(f"{answer.image}: {f'unknown (nearest: {best})' if answer.unknown else best}")


def _json(answer: Prediction, first: bool) -> None:
    sys.stdout.write(json.dumps(answer.as_json(), ensure_ascii=False) + "\n")


def _csv(answer: Prediction, first: bool) -> None:
    table = csv.writer(sys.stdout, lineterminator="\n")
    if first:
        table.writerow(["image", "label", "probability", "error", "best"])
    best = "; ".join(f"{name} {p:.4f}" for name, p in answer.best)
    chance = f"{answer.probability:.4f}" if answer.best else ""
    table.writerow([answer.image, answer.label, chance, answer.error, best])
