"""The Python interface: learn, load, predict, extend, evaluate, save."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from cofima.classifier import edit
from cofima.classifier.evaluate import Evaluation, evaluate
from cofima.classifier.learn import Extension, extend, learn_model, resolve, train_options
from cofima.classifier.measure import PENDING, Keep, held_out_accuracy
from cofima.classifier.predict import BATCH, Prediction, decode_readable, predictions, probabilities, several
from cofima.classifier.scoring import Accuracy
from cofima.classifier.stages import Effort, command_id
from cofima.core.errors import CofimaError
from cofima.core.lock import folder_lock
from cofima.core.progress import SILENT, Progress
from cofima.data.duplicates import refuse_model_among_photos
from cofima.data.loading.loader import ImageLike
from cofima.store import hub, model_folder
from cofima.store.generation import Generation
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
    ``origin``                    the commit on the hub that it was loaded from, or None
    ``accuracy``                  on images held out when it last learned, class by class, or None
    ``calibrated``                True if the probabilities were fitted on held-out images
    ============================  ==============================================================

    An image is a path, a Pillow image, an array [H, W], [H, W, 3] or [H, W, 4], or a tensor
    [3, H, W]; whole numbers count to 255, floats to 1. ``images`` is one or a sequence of them.
    """

    def __init__(self, model: Model, folder: PathLike | None = None, *, origin: str | None = None) -> None:
        self.model, self.origin = model, origin
        self.folder = None if folder is None else Path(folder)

    def __repr__(self) -> str:
        known = f"{len(self.classes)} classes"
        return f"Classifier({self.model.method.label}, {self.model.backbone.name}, {known})"

    @property
    def classes(self) -> list[str]:
        """Return the names of all classes, in the order of the probabilities."""
        return self.model.classes

    @property
    def generation(self) -> Path | None:
        """Return the path of the generation that it was loaded from or saved as; None before."""
        return None if self.model.generation is None else self.model.generation.path

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
        keep_features: bool | None = None,
        only_new: bool = False,
        skip_unreadable: bool = False,
        epochs: int | None = None,
        fast: bool = False,
        minutes: float | None = None,
        settings: Sequence[str] = (),
        progress: Progress = SILENT,
        folder: PathLike | None = None,
    ) -> Extension:
        """Learn new classes, or more images of known ones, from a folder or CSV file; no old image is needed.

        Args:
            photos: A folder per class, or a CSV file with the columns path and label.
            check: Images of old classes on which to measure their loss of accuracy.
            max_drop: Points that old classes may lose on average, if that can be told from images of them
                (``check``, or kept ones) or from kept features; more raises :class:`ForgettingError`, and
                the classifier stays as it was.
            keep_images: Held-out images of each class to keep in the model folder; by default as before.
            keep_features: Keep features of held-out images; by default as before.
            only_new: Refuse classes that are known already.
            skip_unreadable: Leave unreadable images out.
            epochs: Passes over the images in fine-tuning, at most; by default as many as ``minutes`` allow.
            fast: Do not fine-tune: the backbone stays as it is.
            minutes: Minutes of fine-tuning; by default two on a CPU, without a limit on a GPU.
            settings: Other ``train.key=value`` items for this extension.
            progress: Receives the progress of the work.
            folder: A model folder to save to, the first answer as soon as it is there; by default nothing is
                saved. The same call continues a fine-tuning that was interrupted.
        """
        how = train_options(self.model.config.train, epochs, settings)
        said: dict[str, object] = {
            "check": None if check is None else folder_name(check),
            "max-drop": max_drop,
        }
        said |= {"keep-images": keep_images, "only-new": only_new, "epochs": epochs, "fast": fast}
        said |= {"minutes": minutes, "skip-unreadable": skip_unreadable}
        said |= {"no-keep-features": keep_features is False}
        typed = command(["extend", "MODEL", folder_name(photos)], said, settings)
        identity = command_id(Path(photos), how.model_dump(mode="json"))
        effort = Effort(fast, minutes, _gives_epochs(epochs, settings), identity=identity, typed=typed)
        saving = _Saving(folder, identity, self.model.generation, progress)
        with saving.interruptible():
            model, outcome = extend(
                saving.parent_of(self.model),
                Path(photos),
                how,
                check=None if check is None else Path(check),
                max_drop=max_drop,
                keep=Keep(keep_images, keep_features),
                effort=replace(effort, decided=saving.epochs),
                only_new=only_new,
                skip_unreadable=skip_unreadable,
                progress=progress,
                save=saving.first,
            )
            saving.last(model)
        self.model, self.folder = model, saving.folder or self.folder
        return outcome

    def evaluate(
        self,
        photos: PathLike,
        *,
        only_known: bool = False,
        skip_unreadable: bool = False,
        progress: Progress = SILENT,
    ) -> Evaluation:
        """Return the accuracy on a folder or CSV file of labeled images, and the confused classes.

        With ``only_known``, classes that were not learned are left out; else they are an error.
        """
        return evaluate(
            self.model,
            Path(photos),
            only_known=only_known,
            skip_unreadable=skip_unreadable,
            progress=progress,
        )

    def rename(self, old: str, new: str) -> None:
        """Give a class another name."""
        self.model = edit.rename(self.model, old, new)

    def remove_class(self, name: str) -> None:
        """Remove a class: its row, its statistics and its kept images."""
        self.model = edit.remove_class(self.model, name)

    def save(self, folder: PathLike | None = None, progress: Progress = SILENT) -> Path:
        """Write a new generation into a model folder; the one before is kept for ``undo``.

        Raise if the folder has another model, or was changed by another process since.

        Args:
            folder: By default the folder that the classifier came from.
            progress: Told of large models.
        """
        where = self.folder if folder is None else Path(folder)
        if where is None:
            raise CofimaError("save: give a folder; this classifier has not been saved yet")
        save_model(self.model, where, progress)
        self.folder = where
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
    keep_features: bool = True,
    skip_unreadable: bool = False,
    fast: bool = False,
    minutes: float | None = None,
    settings: Sequence[str] = (),
    progress: Progress = SILENT,
) -> Classifier:
    """Learn a classifier of photographs: a folder with one folder per class, or a CSV file (path,label).

    Args:
        photos: The folder or CSV file.
        folder: The model folder to write, if given; it must not hold a model yet.
        backbone: Name of the pre-trained network; EfficientNet-Lite0 by default, of ``cofima[lite]``.
        method: Name of the method; ``cofima`` by default.
        epochs: Passes over the images in fine-tuning, at most; by default as many as ``minutes`` allow.
        seed: Seed of the random numbers.
        keep_images: Held-out images of each class to keep in the model folder.
        keep_features: Keep features of held-out images, by which later forgetting is measured.
        skip_unreadable: Leave unreadable images out, and count them.
        fast: Do not fine-tune: the backbone stays as it is, and the answer is there after one pass.
        minutes: Minutes of fine-tuning; by default two on a CPU, without a limit on a GPU.
        settings: Other ``key=value`` items of the configuration.
        progress: Receives the progress of the work.
    """
    if folder is not None:
        refuse_model_among_photos(Path(photos), Path(folder))
    images = Path(photos)
    place = images if images.is_dir() else images.parent
    given = {"backbone": backbone, "method": method, "train.epochs": epochs, "seed": seed}
    config = resolve(f"folder:{place.resolve()}", given, settings)
    said: dict[str, object] = {
        "backbone": config.backbone,
        "method": config.method,
        "epochs": epochs,
        "seed": seed,
    }
    said |= {"keep-images": keep_images or None, "fast": fast, "minutes": minutes}
    said |= {"skip-unreadable": skip_unreadable, "no-keep-features": not keep_features}
    typed = command(["learn", folder_name(photos), "-o", "MODEL"], said, settings)
    with nullcontext() if folder is None else folder_lock(Path(folder)):
        identity = command_id(images, config.model_dump(mode="json"))
        effort = Effort(fast, minutes, _gives_epochs(epochs, settings), identity=identity, typed=typed)
        saving = _Saving(folder, identity, None, progress)
        with saving.interruptible():
            model = learn_model(
                images,
                config,
                keep=Keep(keep_images, keep_features),
                effort=replace(effort, decided=saving.epochs),
                skip_unreadable=skip_unreadable,
                progress=progress,
                save=saving.first,
            )
            saving.last(model)
    return Classifier(model, folder)


def _gives_epochs(epochs: int | None, settings: Sequence[str]) -> bool:
    return epochs is not None or any(item.startswith("train.epochs=") for item in settings)


class _Saving:
    """Save the two stages of a command as one change: the second takes the place of the first.

    Args:
        folder: The model folder, or None to save nothing.
        command: Identity of the command; a folder in which it was interrupted is continued.
        before: The generation that is extended.
        progress: Told of large models.
    """

    def __init__(
        self, folder: PathLike | None, command: str, before: Generation | None, progress: Progress
    ) -> None:
        self.folder, self.progress = None if folder is None else Path(folder), progress
        self.written: Generation | None = None
        self.epochs: int | None = None
        if self.folder is None:
            return
        there = None if model_folder.current(self.folder) is None else model_folder.read(self.folder)
        pending = {} if there is None else there.record.serving.get(PENDING, {})
        if pending.get("command") == command:
            self.written, self.epochs = there, pending["epochs"]
        else:
            check_replaceable(self.folder, before)

    def parent_of(self, model: Model) -> Model:
        """Return the model to extend: the one given, or the one before an interrupted command changed it."""
        if self.written is None or model.generation is None or self.written.id != model.generation.id:
            return model
        parent = model_folder.parent_of(self.written)
        return load_model(
            self.written.path.parent, generation=parent, where=model.config.device, any_size=True
        )

    def first(self, model: Model) -> None:
        """Save the model of the first stage, unless it is there."""
        if self.folder is not None and self.written is None:
            save_model(model, self.folder, self.progress)
            self.written = model.generation

    def last(self, model: Model) -> None:
        """Save the final model, in place of the first stage's."""
        if self.folder is None:
            return
        if self.written is not None:
            model.generation = self.written
        save_model(model, self.folder, self.progress, replaces=self.written is not None)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Tell what is kept if the user interrupts."""
        try:
            yield
        except KeyboardInterrupt as error:
            if self.written is not None:
                kept = f"{self.folder} has the first answer, and the same command continues with fine-tuning"
                error.kept = kept  # type: ignore[attr-defined]
            raise


@contextmanager
def changing(folder: PathLike, progress: Progress = SILENT) -> Iterator[Classifier]:
    """Lock a model folder, yield its classifier for a change, and save it; after an error nothing is saved.

    No other process can change the folder in between, so no change is lost.
    """
    model_folder.require_model(Path(folder))
    with folder_lock(Path(folder)):
        classifier = load(folder, progress=progress)
        yield classifier
        classifier.save(progress=progress)


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
    """Load the classifier of a model folder, written by ``learn``, ``extend``, ``merge`` or a run.

    Args:
        folder: The model folder, or ``hf://OWNER/NAME`` on the hub, best with a commit: ``@REVISION``. What
            comes from the hub is saved only where a folder is given.
        device: Name of the device.
        progress: Receives the progress of the work.
    """
    if isinstance(folder, str) and hub.is_address(folder):
        found = hub.fetch(folder)
        progress.say(f"{found} is in {found.folder}")
        model = load_model(found.folder, where=device, progress=progress, any_size=True)
        return Classifier(model, origin=str(found))
    return Classifier(load_model(folder, where=device, progress=progress, any_size=True), folder)
