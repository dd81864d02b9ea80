"""The Python API: learn, load, predict, extend, evaluate, save."""

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

    Created by :func:`learn` or :func:`load`. Nothing on disk changes until :meth:`save`; a call that
    fails or is interrupted leaves the classifier unchanged.

    ============================  ==============================================================
    ``classes``                   class names, in the order of the probabilities
    ``predict(images)``           a :class:`Prediction` for each image
    ``stream(images)``            the same as an iterator, for any number of images
    ``probabilities(images)``     float32 [N, classes], calibrated on held-out images
    ``extend(photos)``            learn new classes, or more images of known ones
    ``evaluate(folder)``          overall and per-class accuracy, and confused classes
    ``rename``, ``remove_class``  rename or remove a class
    ``history``                   one row per change, oldest first
    ``save(folder)``              write the model folder
    ``model``                     the :class:`~cofima.store.model.Model`: network, method, preprocessing
    ``folder``                    path it was loaded from or last saved to, or None
    ``origin``                    the hub commit it was loaded from, or None
    ``accuracy``                  per-class accuracy on the latest held-out images, or None
    ``calibrated``                True if the probabilities are calibrated on held-out images
    ============================  ==============================================================

    An image is a path, a Pillow image, an array [H, W], [H, W, 3] or [H, W, 4], or a tensor
    [3, H, W]; integers range from 0 to 255, floats from 0 to 1. ``images`` is one image or a sequence.

    Example::

        import cofima

        classifier = cofima.load("parts")
        print(classifier.predict("photo.jpg")[0].label)
        classifier.extend("new_photos")  # photographs of the new classes only
        classifier.save()
    """

    def __init__(self, model: Model, folder: PathLike | None = None, *, origin: str | None = None) -> None:
        self.model, self.origin = model, origin
        self.folder = None if folder is None else Path(folder)

    def __repr__(self) -> str:
        known = f"{len(self.classes)} classes"
        return f"Classifier({self.model.method.label}, {self.model.backbone.name}, {known})"

    @property
    def classes(self) -> list[str]:
        """Names of all classes, in the order of the probabilities."""
        return self.model.classes

    @property
    def generation(self) -> Path | None:
        """Path of the generation it was loaded from or saved as; None if never saved."""
        return None if self.model.generation is None else self.model.generation.path

    @property
    def accuracy(self) -> Accuracy | None:
        """Accuracy on the images held out when it last learned, or None."""
        return held_out_accuracy(self.model)

    @property
    def calibrated(self) -> bool:
        """True if the probabilities are calibrated on held-out images."""
        return "temperature" in self.model.serving

    @property
    def history(self) -> list[HistoryRow]:
        """One row per change, oldest first."""
        return self.model.history

    def predict(
        self, images: ImageLike | Sequence[ImageLike], *, top: int = 1, unknown: float | None = None
    ) -> list[Prediction]:
        """Predict the class of each image.

        Args:
            images: One image or several; an unreadable file gets a prediction with an ``error``.
            top: Number of most likely classes to return.
            unknown: Share of the held-out images that may be rejected, such as 0.05: an image farther from
                every class than all but this share of them is predicted as "unknown".

        Returns:
            One :class:`Prediction` per image, in order.
        """
        return list(self.stream(several(images), top=top, unknown=unknown))

    def stream(
        self, images: Iterable[ImageLike], *, top: int = 1, unknown: float | None = None
    ) -> Iterator[Prediction]:
        """Yield a prediction for each image in order; files are decoded ahead, in bounded memory.

        The arguments are those of :meth:`predict`.
        """
        return predictions(self.model, images, top, unknown)

    def probabilities(self, images: ImageLike | Sequence[ImageLike]) -> Tensor:
        """Return class probabilities, float32 [N, classes]; raise if a file cannot be read."""
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
        """Learn new classes, or more images of known ones, without the old images.

        Args:
            photos: A folder with one subfolder per class, or a CSV file with the columns path and label.
            check: Folder or CSV file of images of old classes, on which to measure their drop in accuracy.
            max_drop: Percentage points that old classes may lose on average. A larger drop, measured on
                ``check`` or stored images or estimated from stored features, raises
                :class:`ForgettingError` and leaves the classifier unchanged. Without any of these the drop
                is not checked.
            keep_images: Held-out images per class to store in the model folder; by default as before.
            keep_features: Store features of held-out images; by default as before.
            only_new: Raise if a class is already known.
            skip_unreadable: Skip unreadable images instead of raising.
            epochs: Maximum number of fine-tuning epochs; by default as many as ``minutes`` allows.
            fast: Do not fine-tune: the backbone stays frozen.
            minutes: Time limit of fine-tuning; by default two minutes on a CPU and none on a GPU.
            settings: Other ``train.key=value`` items for this extension.
            progress: Receives progress reports.
            folder: Model folder to save to; the model of the first stage is saved as soon as it is ready. By
                default nothing is saved. If fine-tuning is interrupted, the same call starts it again.

        Returns:
            The new and the refined classes, their accuracy, and the accuracy of the old classes.

        Raises:
            ForgettingError: If old classes would lose more than ``max_drop``.
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
        """Measure accuracy and confused classes on labeled images.

        Args:
            photos: A folder with one subfolder per class, or a CSV file; of a folder with ``train`` and
                ``test``, the test part is used.
            only_known: Skip classes that the classifier has not learned instead of raising.
            skip_unreadable: Skip unreadable images instead of raising.
            progress: Receives progress reports.
        """
        return evaluate(
            self.model,
            Path(photos),
            only_known=only_known,
            skip_unreadable=skip_unreadable,
            progress=progress,
        )

    def rename(self, old: str, new: str) -> None:
        """Rename a class."""
        self.model = edit.rename(self.model, old, new)

    def remove_class(self, name: str) -> None:
        """Remove a class: its row of the head, its statistics and its stored images."""
        self.model = edit.remove_class(self.model, name)

    def save(self, folder: PathLike | None = None, progress: Progress = SILENT) -> Path:
        """Write a new generation into a model folder; the previous one is kept for ``undo``.

        Raise if the folder holds another model, or if another process has changed it in the meantime.

        Args:
            folder: By default the folder that the classifier was loaded from or last saved to.
            progress: Receives progress reports for large models.

        Returns:
            The model folder.
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
    """Learn an image classifier from labeled photographs.

    Args:
        photos: A folder with one subfolder per class, or a CSV file with the columns path and label.
        folder: Model folder to write; it must not hold a model yet. By default nothing is saved.
        backbone: Name of the pre-trained network; by default EfficientNet-Lite0, from ``cofima[lite]``.
        method: Name of the method; ``cofima`` by default.
        epochs: Maximum number of fine-tuning epochs; by default as many as ``minutes`` allows.
        seed: Random seed.
        keep_images: Held-out images per class to store in the model folder.
        keep_features: Store features of held-out images, on which later forgetting is measured.
        skip_unreadable: Skip unreadable images instead of raising, and report how many.
        fast: Do not fine-tune: the backbone stays frozen, and one pass over the images is enough.
        minutes: Time limit of fine-tuning; by default two minutes on a CPU and none on a GPU.
        settings: Other ``key=value`` items of the configuration.
        progress: Receives progress reports.

    Returns:
        The classifier.

    Example::

        import cofima

        classifier = cofima.learn("photos", "parts")  # photos/bolt/*.jpg, photos/nut/*.jpg, ...
        print(classifier.predict("photo.jpg")[0].label)
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
    """Save the two stages of a command as one change: the second replaces the first.

    The first stage is saved so that a user who interrupts fine-tuning still has a model, and replaced so
    that ``undo`` reverts the whole command.

    Args:
        folder: The model folder, or None to save nothing.
        command: Identity of the command; if it was interrupted in this folder, it is completed.
        before: The generation that is extended.
        progress: Receives progress reports for large models.
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
        """Return the model to extend: the one given, or its parent if an interrupted command saved it."""
        if self.written is None or model.generation is None or self.written.id != model.generation.id:
            return model
        parent = model_folder.parent_of(self.written)
        return load_model(
            self.written.path.parent, generation=parent, where=model.config.device, any_size=True
        )

    def first(self, model: Model) -> None:
        """Save the model of the first stage, unless an interrupted command already did."""
        if self.folder is not None and self.written is None:
            save_model(model, self.folder, self.progress)
            self.written = model.generation

    def last(self, model: Model) -> None:
        """Save the final model, replacing that of the first stage."""
        if self.folder is None:
            return
        if self.written is not None:
            model.generation = self.written
        save_model(model, self.folder, self.progress, replaces=self.written is not None)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Add to a KeyboardInterrupt what was saved before it."""
        try:
            yield
        except KeyboardInterrupt as error:
            if self.written is not None:
                kept = f"{self.folder} has the first answer, and the same command continues with fine-tuning"
                error.kept = kept  # type: ignore[attr-defined]
            raise


@contextmanager
def changing(folder: PathLike, progress: Progress = SILENT) -> Iterator[Classifier]:
    """Lock a model folder, yield its classifier for a change, and save it unless an error occurs.

    The lock spans loading and saving, so no change by another process can be lost in between.
    """
    model_folder.require_model(Path(folder))
    with folder_lock(Path(folder)):
        classifier = load(folder, progress=progress)
        yield classifier
        classifier.save(progress=progress)


def folder_name(path: PathLike) -> str:
    """Return the name of a folder or file without its path, which is private."""
    return Path(path).resolve().name


def command(words: Sequence[str], options: Mapping[str, object], settings: Sequence[str]) -> str:
    """Return a command line with the given options; a value of True is a flag."""
    given: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            given += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(["cofima", *words, *given, *map(_without_path, settings)])


def _without_path(setting: str) -> str:
    """Replace a path in a ``key=value`` item by the name of the file."""
    key, _, value = setting.partition("=")
    return f"{key}={Path(value).name}" if value.startswith(("/", "~", ".")) else setting


def load(folder: PathLike, *, device: str = "auto", progress: Progress = SILENT) -> Classifier:
    """Load a classifier from a model folder, written by ``learn``, ``extend``, ``merge`` or a run.

    Args:
        folder: The model folder, or ``hf://OWNER/NAME`` on the hub, preferably with a commit:
            ``@REVISION``. A classifier from the hub has no folder, so :meth:`Classifier.save` needs one.
        device: Device to compute on, such as ``cpu`` or ``cuda``; ``auto`` chooses.
        progress: Receives progress reports.

    Returns:
        The classifier of the current generation.
    """
    if isinstance(folder, str) and hub.is_address(folder):
        found = hub.fetch(folder)
        progress.say(f"{found} is in {found.folder}")
        model = load_model(found.folder, where=device, progress=progress, any_size=True)
        return Classifier(model, origin=str(found))
    return Classifier(load_model(folder, where=device, progress=progress, any_size=True), folder)
