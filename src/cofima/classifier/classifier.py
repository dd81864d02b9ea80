"""The Python interface: learn, load, predict, extend, evaluate, save."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from cofima.classifier import edit
from cofima.classifier.evaluate import Evaluation, evaluate
from cofima.classifier.learn import (
    Extension,
    extend,
    held_out_accuracy,
    learn_model,
    resolve,
    train_options,
)
from cofima.classifier.predict import BATCH, Prediction, decode_readable, predictions, probabilities, several
from cofima.classifier.scoring import Accuracy
from cofima.core.errors import CofimaError
from cofima.core.lock import folder_lock
from cofima.core.progress import SILENT, Progress
from cofima.data.loading.loader import ImageLike
from cofima.store import model_folder
from cofima.store.history import HistoryRow
from cofima.store.model import Model, load_model, save_model
from cofima.store.model_folder import check_replaceable

PathLike = str | Path


class Classifier:
    """An image classifier that can learn more classes without the old images.

    Made by :func:`learn` or :func:`load`. Nothing on disk changes before :meth:`save`; a call that
    fails, or is interrupted, leaves the classifier as it was.

    ============================  ==============================================================
    ``classes``                   names, in the order of the probabilities
    ``predict(images)``           a :class:`Prediction` for each image
    ``stream(images)``            the same, one at a time, for any number of images
    ``probabilities(images)``     float32 [N, classes], calibrated on held-out images
    ``extend(photos)``            learn new classes, or more images of known ones
    ``evaluate(folder)``          accuracy, in total and per class, and confused classes
    ``rename``, ``remove_class``  rename or remove a class
    ``history``                   one row for each change, oldest first
    ``save(folder)``              write the model folder
    ``model``                     the :class:`~cofima.store.model.Model` below: network, method, preprocessing
    ``folder``                    path it was loaded from or last saved to, or None
    ``accuracy``                  on images held out when it last learned, class by class, or None
    ``calibrated``                True if the probabilities were fitted on held-out images
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
        """Return the accuracy on the images held out when it last learned, or None."""
        return held_out_accuracy(self.model)

    @property
    def calibrated(self) -> bool:
        """Return True if the probabilities were fitted on held-out images."""
        return "temperature" in self.model.serving

    @property
    def history(self) -> list[HistoryRow]:
        """Return one row for each change, oldest first."""
        return self.model.history

    def predict(
        self, images: ImageLike | Sequence[ImageLike], *, top: int = 1, unknown: float | None = None
    ) -> list[Prediction]:
        """Return a prediction for each image.

        Args:
            images: One image or several; a file that cannot be read gets a prediction with an ``error``.
            top: Number of classes to name.
            unknown: Answer "unknown" for images farther from every class than all but this share of the
                held-out images.
        """
        return list(self.stream(several(images), top=top, unknown=unknown))

    def stream(
        self, images: Iterable[ImageLike], *, top: int = 1, unknown: float | None = None
    ) -> Iterator[Prediction]:
        """Yield a prediction for each image in order; files are decoded ahead, in bounded memory."""
        return predictions(self.model, images, top, unknown)

    def probabilities(self, images: ImageLike | Sequence[ImageLike]) -> Tensor:
        """Return the probability of each class for each image; an unreadable file is an error."""
        found = decode_readable(several(images), self.model.view.pixel_format)
        starts = range(0, len(found), BATCH)
        batches = [probabilities(self.model, torch.stack(found[at : at + BATCH])) for at in starts]
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
            check: Images of old classes on which to measure their loss of accuracy.
            max_drop: Points that old classes may lose on average, if images of them are there (``check``,
                or kept ones); more raises :class:`ForgettingError`, and the classifier stays as it was.
            keep_images: Held-out images of each class to keep in the model folder; by default as before.
            only_new: Refuse classes that are known already.
            skip_unreadable: Leave unreadable images out.
            epochs: Passes over the images; by default as before.
            settings: Other ``train.key=value`` items for this extension.
            progress: Receives the progress of the work.
        """
        how = train_options(self.model.config.train, epochs, settings)
        self.model, outcome = extend(
            self.model,
            Path(photos),
            how,
            check=None if check is None else Path(check),
            max_drop=max_drop,
            keep_images=keep_images,
            only_new=only_new,
            skip_unreadable=skip_unreadable,
            progress=progress,
        )
        said = {"check": None if check is None else folder_name(check), "max-drop": max_drop}
        said |= {"keep-images": keep_images, "only-new": only_new, "epochs": epochs}
        said |= {"skip-unreadable": skip_unreadable}
        for row in outcome.rows:
            row.command = command(["extend", "MODEL", folder_name(photos)], said, settings)
        return outcome

    def evaluate(
        self, photos: PathLike, *, skip_unreadable: bool = False, progress: Progress = SILENT
    ) -> Evaluation:
        """Return the accuracy on a folder or CSV file of labeled images, and the confused classes."""
        return evaluate(self.model, Path(photos), skip_unreadable, progress)

    def rename(self, old: str, new: str) -> None:
        """Give a class another name."""
        self.model = edit.rename(self.model, old, new)

    def remove_class(self, name: str) -> None:
        """Remove a class: its row, its statistics and its kept images."""
        self.model = edit.remove_class(self.model, name)

    def save(self, folder: PathLike | None = None, progress: Progress = SILENT) -> Path:
        """Write a new generation into a model folder; the one before is kept for ``undo``.

        By default the folder that the classifier came from. Raise if the folder has another model, or was
        changed by another process since.
        """
        where = self.folder if folder is None else Path(folder)
        if where is None:
            raise CofimaError("save: give a folder; this classifier has not been saved yet")
        with folder_lock(where):
            check_replaceable(where, self.generation)
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
    """Learn a classifier of photographs: a folder with one folder per class, or a CSV file (path,label).

    Args:
        photos: The folder or CSV file.
        folder: The model folder to write, if given; it must not hold a model yet.
        backbone: Name of the pre-trained network; EfficientNet-Lite0 by default, of ``cofima[lite]``.
        method: Name of the method; ``cofima`` by default.
        epochs: Passes over the images at most.
        seed: Seed of the random numbers.
        keep_images: Held-out images of each class to keep in the model folder.
        skip_unreadable: Leave unreadable images out, and count them.
        settings: Other ``key=value`` items of the configuration.
        progress: Receives the progress of the work.
    """
    if folder is not None:
        check_replaceable(Path(folder), None)
    images = Path(photos)
    place = images if images.is_dir() else images.parent
    given = {"backbone": backbone, "method": method, "train.epochs": epochs, "seed": seed}
    config = resolve(f"folder:{place.resolve()}", given, settings)
    with nullcontext() if folder is None else folder_lock(Path(folder)):
        model = learn_model(
            images, config, keep_images=keep_images, skip_unreadable=skip_unreadable, progress=progress
        )
        said = {"backbone": config.backbone, "method": config.method, "epochs": epochs, "seed": seed}
        said |= {"keep-images": keep_images or None, "skip-unreadable": skip_unreadable}
        model.history[-1].command = command(["learn", folder_name(photos), "-o", "MODEL"], said, settings)
        made = Classifier(model)
        if folder is not None:
            made.save(folder, progress)
    return made


def folder_name(path: PathLike) -> str:
    """Return the name of a folder or file without the path to it, which is private."""
    return Path(path).resolve().name


def command(words: Sequence[str], options: Mapping[str, object], settings: Sequence[str]) -> str:
    """Return a command line with the options that were given; a flag is True."""
    given: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            given += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(["cofima", *words, *given, *map(_without_path, settings)])


def _without_path(setting: str) -> str:
    """Return a ``key=value`` item with the name of a file in place of its path."""
    key, _, value = setting.partition("=")
    return f"{key}={Path(value).name}" if value.startswith(("/", "~", ".")) else setting


def load(folder: PathLike, *, device: str = "auto", progress: Progress = SILENT) -> Classifier:
    """Load the classifier of a model folder, written by ``learn``, ``extend``, ``merge`` or a run."""
    return Classifier(load_model(folder, where=device, progress=progress, any_size=True), folder)
