"""The classifier that a program uses: learn, ask, extend, save."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cofima.classifier import edit
from cofima.classifier.evaluate import Evaluation, evaluate
from cofima.classifier.learn import ExtendRequest, Extension, extend, learn_model, resolve, train_options
from cofima.classifier.predict import BATCH, Prediction, predictions, probabilities, several
from cofima.classifier.scoring import Accuracy
from cofima.core.errors import CofimaError
from cofima.core.lock import folder_lock
from cofima.core.progress import SILENT, Progress
from cofima.data.loading.loader import ImageLike, decode_all
from cofima.store import model_folder
from cofima.store.history import HistoryRow
from cofima.store.model import Model, load_model, save_model
from cofima.store.model_folder import check_replaceable

PathLike = str | Path


class Classifier:
    """Names the class of an image, and can learn more classes without the old images.

    Made by :func:`learn` or :func:`load`. Nothing on disk changes before :meth:`save`; a call that
    fails, or is interrupted, leaves the classifier as it was.

    ============================  ==============================================================
    ``classes``                   names, in the order of the probabilities
    ``predict(images)``           a :class:`Prediction` for each image
    ``stream(images)``            the same, one at a time, for any number of images
    ``probabilities(images)``     float32 [N, classes], calibrated on held-out images
    ``extend(photos)``            learn new classes, or more images of known ones
    ``evaluate(folder)``          accuracy, per class, and what is confused with what
    ``rename``, ``remove_class``  change the name of a class, or take it out
    ``history``                   one row for each thing that happened to it
    ``save(folder)``              write the model folder
    ``model``                     the :class:`~cofima.store.model.Model` below: network, method, preprocessing
    ``folder``                    where it was loaded from or last saved to, or None
    ``accuracy``                  on images held out when it last learned, class by class, or None
    ``calibrated``                whether the probabilities were fitted on held-out images
    ============================  ==============================================================

    An image is a path, a Pillow image, an array [H, W], [H, W, 3] or [H, W, 4], or a tensor
    [3, H, W]; whole numbers count to 255, floats to 1. ``images`` is one or a sequence of them.
    """

    def __init__(self, model: Model, folder: PathLike | None = None) -> None:
        self.model = model
        self.folder = None if folder is None else Path(folder)
        self.generation = None if self.folder is None else model_folder.current(self.folder)

    def __repr__(self) -> str:
        known = f"{len(self.classes)} classes"
        return f"Classifier({self.model.method.label}, {self.model.backbone.name}, {known})"

    @property
    def classes(self) -> list[str]:
        """Return the names of all classes, in the order of the probabilities."""
        return self.model.classes

    @property
    def accuracy(self) -> Accuracy | None:
        """Return the accuracy on what was held out when it last learned, or None."""
        kept = self.model.serving.get("accuracy")
        return None if kept is None else Accuracy(kept["right"], kept["images"])

    @property
    def calibrated(self) -> bool:
        """Tell whether the probabilities were fitted on held-out images."""
        return "temperature" in self.model.serving

    @property
    def history(self) -> list[HistoryRow]:
        """Return what happened to the classifier, oldest first."""
        return self.model.history

    def predict(
        self, images: ImageLike | Sequence[ImageLike], *, top: int = 1, unknown: float | None = None
    ) -> list[Prediction]:
        """Return an answer for each image.

        Args:
            images: One image or several; a file that cannot be read gets an answer with an ``error``.
            top: How many classes to name.
            unknown: Answer "unknown" where an image is farther from every class than all but this share
                of the images that were held out.
        """
        return list(self.stream(several(images), top=top, unknown=unknown))

    def stream(
        self, images: Iterable[ImageLike], *, top: int = 1, unknown: float | None = None
    ) -> Iterator[Prediction]:
        """Yield an answer for each image in order; files are decoded ahead, and memory stays small."""
        return predictions(self.model, images, top, unknown)

    def probabilities(self, images: ImageLike | Sequence[ImageLike]) -> Tensor:
        """Return the probability of each class for each image; an unreadable file is an error."""
        found = []
        for one in decode_all(several(images), self.model.view.pixel_format):
            if one.pixels is None:
                raise CofimaError(f"{one.name}: {one.fault}")
            found.append(one.pixels)
        batches = [probabilities(self.model, torch.stack(found[at : at + BATCH])) for at in _starts(found)]
        return torch.cat(batches) if batches else torch.empty(0, len(self.classes))

    def extend(
        self,
        photos: PathLike,
        *,
        check: PathLike | None = None,
        max_drop: float | None = None,
        keep_images: int | None = None,
        only_new: bool = False,
        skip_unreadable: bool = False,
        epochs: int | None = None,
        settings: Sequence[str] = (),
        progress: Progress = SILENT,
    ) -> Extension:
        """Learn new classes, or more images of known ones, from a folder or CSV file; no old image is needed.

        Args:
            photos: A folder per class, or a CSV file with the columns path and label.
            check: Images of old classes on which to measure what they lose.
            max_drop: Points that old classes may lose on average, if images of them are there (``check``,
                or kept ones); more raises :class:`ForgettingError`, and the classifier stays as it was.
            keep_images: Held-out images of each class to keep in the model folder; as before, if not given.
            only_new: Refuse classes that are known already.
            skip_unreadable: Leave unreadable images out.
            epochs: Passes over the images, where not those of before.
            settings: Other ``train.key=value`` items for this time.
            progress: Who hears how far it is.
        """
        how = train_options(self.model.config.train, epochs, settings)
        request = ExtendRequest(
            Path(photos),
            None if check is None else Path(check),
            max_drop,
            keep_images,
            only_new,
            skip_unreadable,
        )
        self.model, outcome = extend(self.model, request, how, progress)
        return outcome

    def evaluate(
        self, photos: PathLike, *, skip_unreadable: bool = False, progress: Progress = SILENT
    ) -> Evaluation:
        """Return how often it is right on a folder (or CSV file) of labelled images."""
        return evaluate(self.model, Path(photos), skip_unreadable, progress)

    def rename(self, old: str, new: str) -> None:
        """Give a class another name."""
        self.model = edit.rename(self.model, old, new)

    def remove_class(self, name: str) -> None:
        """Take a class out: its row, what is remembered of it, its kept images."""
        self.model = edit.remove_class(self.model, name)

    def save(self, folder: PathLike | None = None, progress: Progress = SILENT) -> Path:
        """Write a new state into a model folder; the state before stays there, for ``undo``.

        Without a folder it is the one it came from. Another model's folder is refused, and so is one
        that somebody else has changed since.
        """
        where = self.folder if folder is None else Path(folder)
        if where is None:
            raise CofimaError("save: give a folder; this classifier has not been saved yet")
        check_replaceable(where, self.generation)
        with folder_lock(where):
            check_replaceable(where, self.generation)  # as it is now that nobody else can change it
            save_model(self.model, where, progress)
        self.folder, self.generation = where, model_folder.current(where)
        return where


def learn(
    photos: PathLike,
    folder: PathLike | None = None,
    *,
    backbone: str | None = None,
    method: str | None = None,
    epochs: int | None = None,
    seed: int | None = None,
    keep_images: int = 0,
    skip_unreadable: bool = False,
    settings: Sequence[str] = (),
    progress: Progress = SILENT,
) -> Classifier:
    """Return a classifier of the photographs in a folder (one folder per class) or a CSV file (path,label).

    Args:
        photos: Where the images are.
        folder: Where the model is written, if it is given; it must not hold a model yet.
        backbone: Name of the pre-trained network; EfficientNet-Lite0 where installed, else ``vit_micro``.
        method: Name of the method, ``cofima`` if not given.
        epochs: Passes over the images at most.
        seed: Decides everything that is left to chance.
        keep_images: Held-out images of each class to keep in the model folder.
        skip_unreadable: Leave unreadable images out, and count them.
        settings: Other ``key=value`` items of the configuration.
        progress: Who hears how far it is.
    """
    if folder is not None:
        check_replaceable(Path(folder), None)
    given = {"backbone": backbone, "method": method, "train.epochs": epochs, "seed": seed}
    items = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    config = resolve(Path(photos), [*items, *settings])
    with nullcontext() if folder is None else folder_lock(Path(folder)):
        model = learn_model(
            Path(photos), config, keep_images=keep_images, skip_unreadable=skip_unreadable, progress=progress
        )
        made = Classifier(model)
        if folder is not None:
            made.save(folder, progress)
    return made


def load(folder: PathLike, *, device: str = "auto", progress: Progress = SILENT) -> Classifier:
    """Return the classifier of a model folder, of whatever made it: ``learn``, ``extend`` or a run."""
    return Classifier(load_model(folder, where=device, progress=progress, any_size=True), folder)


def _starts(items: Sequence[Any]) -> range:
    return range(0, len(items), BATCH)
