"""Commands for a classifier: learn, extend, predict, evaluate, history, undo, rename and remove-class."""

from __future__ import annotations

import csv
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cofima.cli.console import (
    AnyModel,
    Epochs,
    ModelFolder,
    Photos,
    SkipUnreadable,
    err,
    interruptible,
    out,
    out_option,
    print_table,
    progress,
    read_model,
    say,
    started,
    warn,
)
from cofima.core.errors import CofimaError, problems
from cofima.core.lock import folder_lock
from cofima.core.names import json_line
from cofima.core.wording import count, some

if TYPE_CHECKING:
    from cofima.classifier.classifier import Classifier
    from cofima.classifier.evaluate import Evaluation
    from cofima.classifier.forgetting_check import OldClassComparison
    from cofima.classifier.learn import Extension
    from cofima.classifier.predict import Prediction

Fast = Annotated[bool, typer.Option("--fast", help="Do not fine-tune: the backbone stays frozen.")]
Minutes = Annotated[
    float | None,
    typer.Option(min=0, help="Maximum minutes of fine-tuning; by default 2 on a CPU, no limit on a GPU."),
]
BUDGET_BROKEN = 3  # exit code: old classes lost more than --max-drop
WORST = 3
SHOWN = 10


def learn(
    photos: Photos,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the recipe learn.yaml."),
    ] = None,
    folder: Annotated[Path, out_option("The model folder; it must not hold a model yet.")] = Path("model"),
    backbone: Annotated[
        str | None,
        typer.Option(help="Pre-trained network; EfficientNet-Lite0 by default."),
    ] = None,
    method: Annotated[str | None, typer.Option(help="Name of the method; cofima by default.")] = None,
    epochs: Epochs = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.")] = None,
    fast: Fast = False,
    minutes: Minutes = None,
    keep_images: Annotated[
        int, typer.Option(min=0, help="Held-out images per class to store in the model folder.")
    ] = 0,
    keep_features: Annotated[
        bool, typer.Option(help="Store features of held-out images, to measure forgetting later.")
    ] = True,
    skip_unreadable: SkipUnreadable = False,
) -> None:
    """Learn a classifier from a folder of photographs; it can be extended later without them.

    A first model is ready after one pass over the images. Then the pre-trained network is fine-tuned, if
    there is time, and the result is kept if it is better. A part of each class is held out: one half selects
    and calibrates, accuracy is reported on the other.

    Classes are assumed to be equally likely; if they will be as imbalanced in use as in the folder, give
    options.closed_form.priors=counts.
    """
    from cofima.classifier.classifier import learn as learn_classifier

    with interruptible("nothing was written; run the same command again"):
        made = learn_classifier(
            photos,
            folder,
            backbone=backbone,
            method=method,
            epochs=epochs,
            seed=seed,
            fast=fast,
            minutes=minutes,
            keep_images=keep_images,
            keep_features=keep_features,
            skip_unreadable=skip_unreadable,
            settings=settings or [],
            progress=progress(),
        )
    for line in _learned(made):
        say(line)


def extend(
    model: AnyModel,
    photos: Photos,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[train.KEY=VALUE]...", help="Training settings to override this time."),
    ] = None,
    folder: Annotated[Path | None, out_option("Write another model folder; MODEL is unchanged.")] = None,
    check: Annotated[
        Path | None, typer.Option(help="Images of old classes on which to measure their drop in accuracy.")
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(help="Points that old classes may lose on average; else keep the old model and exit 3."),
    ] = None,
    keep_images: Annotated[
        int | None, typer.Option(min=0, help="Held-out images per class to store; by default as before.")
    ] = None,
    keep_features: Annotated[
        bool | None, typer.Option(help="Store features of held-out images; by default as before.")
    ] = None,
    only_new: Annotated[
        bool, typer.Option("--only-new", help="Refuse classes that are already known.")
    ] = False,
    epochs: Epochs = None,
    fast: Fast = False,
    minutes: Minutes = None,
    skip_unreadable: SkipUnreadable = False,
) -> None:
    """Teach a model new classes, or more images of known ones; the old images are not needed.

    A first model is ready after one pass over the new images; fine-tuning follows if there is time, and is
    kept if it is better. cofima undo reverts the whole command.
    """
    from cofima.classifier.classifier import load
    from cofima.classifier.forgetting_check import ForgettingError
    from cofima.store import hub, model_folder

    if folder is None and hub.is_address(model):
        raise CofimaError(f"{model} is on the hub and cannot be changed there: give a folder with --out")
    source = read_model(model)
    model_folder.require_model(source)
    with folder_lock(folder or source), interruptible("the model is as it was; run the same command again"):
        classifier = load(source, progress=progress())  # locked: nobody else can change it until it is saved
        try:
            outcome = classifier.extend(
                photos,
                check=check,
                max_drop=max_drop,
                keep_images=keep_images,
                keep_features=keep_features,
                only_new=only_new,
                skip_unreadable=skip_unreadable,
                epochs=epochs,
                fast=fast,
                minutes=minutes,
                settings=settings or [],
                progress=progress(),
                folder=folder or source,
            )
        except ForgettingError as error:
            out().print(_losses(error.comparison))
            say(f"cofima: {error}", err())
            raise typer.Exit(BUDGET_BROKEN) from None
    if outcome.old is not None and outcome.old.measured:
        out().print(_losses(outcome.old))
    for line in _extended(classifier, outcome):
        say(line)
    if max_drop is not None and outcome.old is None:
        warn(f"--max-drop was not checked: {outcome.unknown}. Give --check FOLDER with images of old classes")


def predict(
    model: AnyModel,
    images: Annotated[
        list[str], typer.Argument(help="Images, folders of images, or - for a list of paths on stdin.")
    ],
    top: Annotated[int, typer.Option(min=1, help="Number of most likely classes to show.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV: image, label, probability, ...")] = False,
    unknown: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Predict 'unknown' for images farther from every class than all but this share of the "
            "held-out images.",
        ),
    ] = None,
) -> None:
    """Predict the classes of images, with probabilities calibrated on held-out images.

    Exit code 1 if some images could not be read, 2 if none could.
    """
    from cofima.classifier.classifier import load

    if as_json and as_csv:
        raise CofimaError("give --json or --csv, not both")
    paths = find_images(images)
    classifier = load(read_model(model), progress=progress())
    write = _write_json if as_json else _write_csv if as_csv else _write_line
    readable, for_programs = 0, as_json or as_csv
    with interruptible("stopped"):
        found = classifier.stream(paths, top=top, unknown=unknown)
        if len(paths) > 100 and (sys.stdout.isatty() or not for_programs):
            found = progress().track(found, len(paths), "images")
        for number, answer in enumerate(found):
            write(answer, number == 0)
            readable += not answer.error
    if not classifier.calibrated and not for_programs:
        say("note: no images were held out, so the probabilities are not calibrated", err())
    if readable < len(paths):
        say(f"cofima: {len(paths) - readable} of {len(paths)} images could not be read", err())
        raise typer.Exit(1 if readable else 2)


def find_images(given: list[str]) -> list[Path]:
    """Return image paths: files, files in folders, and paths read from stdin for ``-``."""
    from cofima.data.sources.listing import images_below

    words = [w for word in given for w in (sys.stdin.read().splitlines() if word == "-" else [word]) if w]
    paths = [Path(word) for word in words]
    wrong = [f"{path}: no such file or folder" for path in paths if not path.exists()]
    if wrong and len(wrong) == len(paths):
        raise problems("the list of images", wrong[:20])
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += images_below(path)
        else:
            found.append(path)
    if not found:
        raise CofimaError(f"no images in {', '.join(given)}")
    return found


def _write_line(answer: Prediction, first: bool) -> None:
    if answer.error:
        say(f"{answer.image}: error: {answer.error}")
        return
    best = ", ".join(f"{name} {100 * p:.1f} %" for name, p in answer.best)
    say(f"{answer.image}: {f'unknown (nearest: {best})' if answer.unknown else best}")


def _write_json(answer: Prediction, first: bool) -> None:
    started()
    sys.stdout.write(json_line(answer.as_json()) + "\n")


def _write_csv(answer: Prediction, first: bool) -> None:
    from cofima.report.render import csv_cell

    started()
    table = csv.writer(sys.stdout, lineterminator="\n")
    if first:
        table.writerow(["image", "label", "probability", "error", "best"])
    best = "; ".join(f"{name} {p:.4f}" for name, p in answer.best)
    chance = f"{answer.probability:.4f}" if answer.best else ""
    table.writerow(map(csv_cell, [answer.image, answer.label, chance, answer.error, best]))


def evaluate(
    model: AnyModel,
    photos: Photos,
    folder: Annotated[
        Path | None, out_option("Folder for an HTML page, a figure and tables; none by default.")
    ] = None,
    only_known: Annotated[
        bool, typer.Option("--only-known", help="Skip classes that the model has not learned.")
    ] = False,
    skip_unreadable: SkipUnreadable = False,
) -> None:
    """Measure the accuracy on labeled images, in total and per class, and list confused classes."""
    from cofima.classifier.classifier import load

    classifier = load(read_model(model), progress=progress())
    with interruptible("nothing was written"):
        found = classifier.evaluate(
            photos, only_known=only_known, skip_unreadable=skip_unreadable, progress=progress()
        )
    _print_evaluation(found)
    if folder is not None:
        from cofima.classifier.web.page import write  # figures take a second to import

        for path in write(found, folder):
            say(f"Wrote {path}")


def _print_evaluation(found: Evaluation) -> None:
    """Print the accuracy, the least accurate classes, and the most confused pairs."""
    say(f"Accuracy: {found.accuracy.percent:.1f} % on {found.images:,} images of {found.source}")
    say(f"Mean over classes: {found.accuracy.mean_of_classes:.1f} %")
    say(f"Probabilities are off by {found.calibration:.1f} points on average")
    by_class = found.accuracy.by_class
    table = Table("class", "images", "accuracy %", title="Least accurate", title_justify="left")
    for name in sorted(by_class, key=lambda name: by_class[name])[:SHOWN]:
        table.add_row(name, str(found.accuracy.images[name]), f"{by_class[name]:.1f}")
    out().print(table)
    if found.confused:
        pairs = Table("class", "taken for", "images", title="Most confused", title_justify="left")
        for true, said, images in found.confused[:SHOWN]:
            pairs.add_row(true, said, str(images))
        out().print(pairs)


def history(model: AnyModel) -> None:
    """Show the history of a model: what it learned, when, from how many images, and its accuracy."""
    from cofima.report.history import features_kept, history_table
    from cofima.store import model_folder

    rows = model_folder.read_history(read_model(model))
    print_table(history_table(rows).filled())
    if kept := features_kept(rows):
        say(f"Features of {count(kept, 'image')} are kept in it, to measure what later extensions lose")


def undo(model: ModelFolder) -> None:
    """Revert the last change; earlier states are not kept."""
    from cofima.store import model_folder

    left, now = model_folder.undo(model)
    say(
        f"{model} is again as it was: {now.name} with {len(now.record.classes)} classes "
        f"({left.name} is no longer in force)"
    )


def rename(
    model: ModelFolder,
    old: Annotated[str, typer.Argument(help="The name of a class.")],
    new: Annotated[str, typer.Argument(help="Its new name.")],
) -> None:
    """Rename a class; cofima undo reverts it."""
    from cofima.classifier.classifier import changing

    with changing(model) as classifier:
        classifier.rename(old, new)
    say(f"{model}: '{old}' is now called '{new}'")


def remove_class(
    model: ModelFolder,
    name: Annotated[str, typer.Argument(metavar="CLASS", help="The name of a class.")],
) -> None:
    """Remove a class from a model, so that it is never predicted again; cofima undo restores it.

    Its row of the head, its statistics and its stored images are deleted; what the backbone learned from it
    remains.
    """
    from cofima.classifier.classifier import changing

    with changing(model) as classifier:
        classifier.remove_class(name)
    left = len(classifier.classes)
    say(f"{model}: '{name}' is removed; {count(left, 'class', 'es')} {'is' if left == 1 else 'are'} left")
    say("  the state before, which undo returns to, still knows it until the next change")


def _learned(made: Classifier) -> Iterator[str]:
    """Yield the lines about a learned classifier: classes, accuracy, folder, commands to try next."""
    from cofima.classifier.measure import why_unseen

    row, accuracy = made.history[-1], made.accuracy
    yield f"Learned {count(len(made.classes), 'class', 'es')} from {count(row.train_images or 0, 'image')}"
    yield f"  in {_duration(row.seconds['total'])}: {made.model.method.label} on {made.model.backbone.name}"
    if accuracy is None or accuracy.percent is None:
        yield "Accuracy: unknown; no class has five images or more, so none were held out"
    else:
        yield (
            f"Accuracy: {accuracy.percent:.1f} % on {count(sum(accuracy.images.values()), 'image')}, "
            f"{why_unseen(made.model)}"
        )
        yield _least_accurate(accuracy.by_class)
    yield from _kept(made)
    where = shlex.quote(str(made.folder))
    yield "Try next:"
    yield f"  cofima predict {where} PHOTO.jpg"
    yield f"  cofima extend {where} MORE_PHOTOS"


def _extended(made: Classifier, outcome: Extension) -> Iterator[str]:
    """Yield the lines about an extension: classes, accuracy, drop of old classes, folder."""
    from cofima.classifier.measure import why_unseen

    if outcome.new:
        yield f"Learned {count(len(outcome.new), 'new class', 'es')}: {some(outcome.new)}"
    if outcome.more:
        yield f"Learned more images of known classes: {some(outcome.more)}"
    seconds = sum(row.seconds["total"] for row in outcome.rows)
    yield f"  from {count(outcome.train_images, 'image')} in {_duration(seconds)}"
    if outcome.accuracy.percent is None:
        yield "Accuracy on these: unknown; no images were held out"
    else:
        images = sum(outcome.accuracy.images.values())
        on = count(images, "image")
        yield f"Accuracy on these: {outcome.accuracy.percent:.1f} % on {on}, {why_unseen(made.model)}"
        yield _least_accurate(outcome.accuracy.by_class)
    if outcome.overall.percent is not None and len(outcome.overall.images) > len(outcome.accuracy.images):
        known, images = len(outcome.overall.images), sum(outcome.overall.images.values())
        percent, many = outcome.overall.percent, len(made.classes)
        yield f"Accuracy on {known} of {many} classes: {percent:.1f} % on {count(images, 'image')}"
    yield _lost(outcome)
    yield from _kept(made)


def _lost(outcome: Extension) -> str:
    old = outcome.old
    if old is None:
        return f"Old classes: unknown; {outcome.unknown}. To know, give --check FOLDER with images of them"
    before, after = old.before.mean_of_classes, old.after.mean_of_classes
    sure = "" if old.measured else ", an estimate"
    low, high = old.interval
    lost = f"{old.drop:.1f} points lost, 90 % interval {low:.1f} to {high:.1f}"
    if old.drop < 0:
        lost = f"{-old.drop:.1f} points gained, 90 % interval {-high:.1f} to {-low:.1f}"
    return f"Old classes: {before:.1f} % before, {after:.1f} % after{sure} ({lost}; {old.rests_on})"


def _losses(old: OldClassComparison) -> Table:
    """Return the accuracy of each old class before and after, largest drop first."""
    table = Table("class", "images", "before %", "after %", "change")
    before, after = old.before.by_class, old.after.by_class
    for name in sorted(before, key=lambda name: after[name] - before[name]):
        change = after[name] - before[name]
        images = str(old.before.images[name])
        table.add_row(name, images, f"{before[name]:.1f}", f"{after[name]:.1f}", f"{change:+.1f}")
    return table


def _least_accurate(by_class: dict[str, float]) -> str:
    low = sorted((name for name in by_class if by_class[name] < 100), key=lambda name: by_class[name])
    if not low:
        return "  every class at 100 %"
    return "  least accurate: " + ", ".join(f"{name} {by_class[name]:.0f} %" for name in low[:WORST])


def _kept(made: Classifier) -> Iterator[str]:
    """Yield the lines about the model folder: path, size, stored images."""
    assert made.folder is not None
    assert made.model.generation is not None
    yield f"Model: {made.folder} ({made.model.generation.size / 1e6:.1f} MB)"
    held = 0 if made.model.images is None else len(made.model.images)
    if held:
        yield f"  {count(held, 'held-out image')} kept in it, to measure what later extensions lose"
    if made.model.method.keeps_images:
        yield f"  {made.model.method.label} keeps images that it learned from in it"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
