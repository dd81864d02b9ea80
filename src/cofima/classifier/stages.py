"""Planning of the second stage (fine-tuning), and its gain over the first."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cofima.classifier.forgetting_check import LEAST_CLASSES
from cofima.core.atomic import json_digest
from cofima.data.sources.listing import Split, find_images
from cofima.methods import Method
from cofima.methods.components.cost import Plan
from cofima.store.history import HistoryRow
from cofima.store.model import Model
from cofima.training.options import TrainOptions

MINUTES = 2.0  # default time limit of fine-tuning on a CPU


@dataclass(frozen=True)
class Effort:
    """Limits of fine-tuning.

    Attributes:
        fast: Do not fine-tune.
        minutes: Time limit; None means two minutes on a CPU and no limit on a GPU.
        epochs_given: The user gave the number of epochs, so there is no time limit.
        decided: Number of epochs that the same command had planned before it was interrupted.
        identity: Identity of the command, from :func:`command_id`.
        typed: The command line, for the history.
    """

    fast: bool = False
    minutes: float | None = None
    epochs_given: bool = False
    decided: int | None = None
    identity: str = ""
    typed: str = ""

    def refusals(self, method: Method) -> list[str]:
        """Return the problems of these values."""
        wrong = []
        if self.minutes is not None and not self.minutes >= 0:
            wrong.append(f"minutes = {self.minutes:g}: must be at least 0")
        trains = not (method.is_solved or method.frozen_backbone or method.fixed_features)
        if self.fast and trains:
            wrong.append(f"fast: {method.label} has no answer before it has trained; choose another method")
        return wrong

    def seconds(self, device: torch.device) -> float:
        """Return the time limit of fine-tuning in seconds."""
        if self.minutes is not None:
            return 60 * self.minutes
        return 60 * MINUTES if device.type == "cpu" else float("inf")


EFFORT = Effort()


def command_id(photos: Path, how: Any) -> str:
    """Return the identity of a command: a digest of the photographs' names and sizes and of the settings.

    A call with the identity of an interrupted one completes it. File contents are not read.
    """
    files = sorted((file.key, file.path.stat().st_size) for file in find_images(photos).files)
    return json_digest([files, how])


@dataclass(frozen=True)
class FineTuning:
    """Plan of the second stage: its training options, or the reason why there is none.

    Attributes:
        how: Training options.
        said: Message to the user.
        refused: Reason why there is no second stage, or an empty string.
        repeat: Option that makes another machine decide the same, if time decided here.
    """

    how: TrainOptions
    said: str = ""
    refused: str = ""
    repeat: str = ""


def plan_fine_tuning(
    first: Model,
    before: Model | None,
    rows: Sequence[HistoryRow],
    splits: Sequence[Split],
    how: TrainOptions,
    effort: Effort,
    most: "Gain",
) -> FineTuning:
    """Decide on the second stage and its number of epochs, from the time that the first stage took.

    Args:
        first: The model of the first stage.
        before: The model that is extended, or None.
        rows: History rows of the first stage, with its times.
        splits: The images.
        how: Training options; their epochs are the maximum.
        effort: Limits of fine-tuning.
        most: Upper bound of the gain, if every selection image were classified correctly.
    """
    classes = torch.unique(torch.cat([split.train.labels for split in splits]))
    images = sum(len(split.train) for split in splits)
    if effort.fast:
        return FineTuning(how, refused="the backbone stays as it was, as asked (fast)")
    if not any(len(split.choose) for split in splits):
        return FineTuning(how, refused="not fine-tuned: no images could be held out to judge it by")
    if before is not None and len(classes) < LEAST_CLASSES:
        few = f"not fine-tuned: what {LEAST_CLASSES - 1} classes or fewer do to old ones cannot be judged"
        return FineTuning(how, refused=few)
    if effort.decided is not None:  # as planned before the interruption: new timings may give another number
        return FineTuning(
            _with_epochs(how, effort.decided),
            "the fine-tuning that was interrupted begins anew",
            repeat="" if effort.epochs_given else f"--epochs {effort.decided}",
        )
    if effort.epochs_given:
        return FineTuning(how, f"fine-tuning, at most {how.epochs} epochs as asked")
    if before is not None and before.kept.taught.any():
        same = (
            "not fine-tuned: kept features of old classes taught the head, and cannot judge a moved backbone"
        )
        return FineTuning(how, refused=f"{same} (--epochs N fine-tunes all the same)")
    if not most.counts:
        judges = f"the {most.images} images that would judge it"
        few = f"none of {judges} is taken for another class"
        if most.points > 0:
            few = f"of {judges} too few are taken for another class to show a gain"
        return FineTuning(how, refused=f"not fine-tuned: {few}")
    allowed = effort.seconds(first.method.context.device)
    an_image = sum(row.seconds.get("statistics", 0.0) for row in rows) / images
    # A plan averages over equal tasks: with this many, the images are practically all of later tasks.
    tasks = 1 if before is None else 10**6
    for epochs in range(how.epochs, 0, -1):
        seconds = an_image * first.method.cost(Plan(epochs, images, 0, tasks, how.head_init == "lda")).work
        if seconds <= allowed:
            return FineTuning(
                _with_epochs(how, epochs),
                f"fine-tuning for {_about(seconds)} at most (--fast leaves it out)",
                repeat=f"--epochs {epochs}",
            )
    return FineTuning(
        how,
        refused=f"not fine-tuned: one epoch would take {_about(seconds)}, more than --minutes allows",
        repeat="--fast",
    )


def _with_epochs(how: TrainOptions, epochs: int) -> TrainOptions:
    return how if epochs == how.epochs else how.model_copy(update={"epochs": epochs, "milestones": None})


def _about(seconds: float) -> str:
    return f"about {seconds / 60:.1f} minutes" if seconds >= 60 else f"about {seconds:.0f} s"


@dataclass(frozen=True)
class Gain:
    """Gain of the second stage in percentage points, as the mean over classes, with its standard error.

    A gain counts if it exceeds two standard errors. Chance alone exceeds one in one of six cases, and a worse
    network would then be kept.

    Attributes:
        points: The gain.
        noise: Its standard error.
        images: Number of images.
    """

    points: float
    noise: float
    images: int

    @property
    def counts(self) -> bool:
        """True if the gain exceeds its noise."""
        return self.points > 2 * self.noise

    @property
    def said(self) -> str:
        """The gain in words."""
        verdict = "taken" if self.counts else "not taken, the first answer stays"
        return (
            f"{self.points:+.1f} points, standard error {self.noise:.1f}, on {self.images} held-out images "
            f"that report nothing else: {verdict}"
        )


def gain_of(was: Tensor, now: Tensor, labels: Tensor) -> Gain:
    """Compare two stages on the same images.

    Args:
        was: Probability that the first stage classifies each image correctly.
        now: The same for the second stage.
        labels: The class of each image.
    """
    if not len(labels):
        return Gain(0.0, 0.0, 0)
    places = torch.unique(labels, return_inverse=True)[1]
    counts = torch.bincount(places)
    gained = (now - was) / (len(counts) * counts[places])  # each class has the same weight
    return Gain(100 * float(gained.sum()), 100 * float(gained.square().sum().sqrt()), len(labels))
