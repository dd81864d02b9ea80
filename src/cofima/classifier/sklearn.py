"""Scikit-learn estimator: fit, partial_fit and predict on arrays of images.

>>> classifier = ImageClassifier().fit(images, labels)  # uint8 [n, H, W, 3]
>>> classifier.partial_fit(more_images, new_labels)  # classes may be new; the old images are not needed
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array, check_random_state, check_X_y, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from cofima.classifier.classifier import Classifier
from cofima.classifier.learn import empty_model, learn_parts, refusals, resolve
from cofima.classifier.measure import KEEP, Part
from cofima.classifier.predict import BATCH, probabilities
from cofima.classifier.stages import Effort
from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT
from cofima.data.image_set import image_set
from cofima.data.loading.decoder import decode
from cofima.data.sources.listing import MIN_TO_HOLD_OUT, Split
from cofima.data.splits import choose_images, every_other, share_of
from cofima.store.config import DEFAULT_METHOD, Config
from cofima.store.model import Model, copy_model, load_model, save_model


class ImageClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Image classifier; :meth:`partial_fit` learns more classes later, without the old images.

    ``X`` is [n, H, W, 3] or [n, H, W]: integers range from 0 to 255, floats from 0 to 1. It may be flattened
    to [n, features] with ``image_shape``. Without ``image_shape``, rows of features are rendered as square
    gray images, each feature scaled by its range in the first ``fit``; this works, but the estimator is
    meant for images.

    Args:
        backbone: Name of the pre-trained network; by default EfficientNet-Lite0, from ``cofima[lite]``.
        method: Name of the method.
        fine_tune: Also fine-tune the backbone, and keep the result if it is better on images held out for
            this purpose. Otherwise the backbone stays frozen and one pass is enough, as with
            ``cofima learn --fast``. A method without a closed-form head always trains.
        epochs: Maximum number of training epochs; by default that of ``cofima learn``.
        image_shape: Shape (H, W, 3) or (H, W) of the image in each flattened row of ``X``.
        settings: Other ``key=value`` items of the configuration.
        random_state: Random seed or generator.

    Attributes:
        classes_: The labels, in the order of the probabilities; new ones come last.
        model_: The underlying :class:`~cofima.store.model.Model`; to save it, use :meth:`to_classifier`.

    Example::

        from cofima import ImageClassifier

        classifier = ImageClassifier().fit(images, labels)
        classifier.partial_fit(new_images, new_labels)  # without the old images
        classifier.predict(test_images)
    """

    def __init__(
        self,
        backbone: str | None = None,
        method: str = DEFAULT_METHOD,
        fine_tune: bool = False,
        epochs: int | None = None,
        image_shape: tuple[int, ...] | None = None,
        settings: Sequence[str] = (),
        random_state: Any = 0,
    ) -> None:
        self.backbone = backbone
        self.method = method
        self.fine_tune = fine_tune
        self.epochs = epochs
        self.image_shape = image_shape
        self.settings = settings
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> "ImageClassifier":
        """Learn all classes at once, starting from the pre-trained weights.

        Args:
            X: Images [n, H, W, 3] or [n, H, W], or rows [n, features].
            y: Labels [n].
        """
        images, labels = self._checked(X, y, first=True)
        self.classes_, places = np.unique(labels, return_inverse=True)
        config = self._config()
        self.model_ = empty_model(config)
        part = self._part(self.classes_.tolist(), self._pixels(images), places)
        self.model_ = self._learned(lambda: empty_model(config), None, [part])
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None) -> "ImageClassifier":
        """Learn new classes, or more images of known ones if the method supports it, without the old images.

        Args:
            X: Images, as for :meth:`fit`.
            y: Labels [n]; they may be new.
            classes: Ignored; present for API consistency. Future classes need not be known in advance.
        """
        if not hasattr(self, "model_"):
            return self.fit(X, y)
        images, labels = self._checked(X, y, first=False)
        found = np.unique(labels)
        new = found[~np.isin(found, self.classes_)].tolist()
        more = self.classes_[np.isin(self.classes_, found)].tolist()
        if wrong := refusals(self.model_.method, [str(label) for label in more]):
            raise ValueError(f"partial_fit: {wrong[0]}")
        pixels, parts = self._pixels(images), []
        all_classes = np.concatenate([self.classes_, np.asarray(new, dtype=found.dtype)])
        place = {label: at for at, label in enumerate(all_classes.tolist())}
        for labels_now in (more, new):
            if labels_now:
                mine = np.isin(labels, labels_now)
                places = np.array([place[label] for label in labels[mine].tolist()])
                parts.append(self._part(labels_now, pixels[torch.from_numpy(mine)], places))
        before = self.model_
        self.model_ = self._learned(lambda: copy_model(before), before, parts)
        self.classes_ = all_classes
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the probability of each class, in the order of ``classes_``."""
        check_is_fitted(self, "model_")
        pixels = self._pixels(self._checked_images(X, first=False))
        found = [probabilities(self.model_, pixels[at : at + BATCH]) for at in range(0, len(pixels), BATCH)]
        whole = torch.cat(found).double()
        return (whole / whole.sum(1, keepdim=True)).numpy()

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the most likely class of each image."""
        best = self.predict_proba(X).argmax(1)  # first, as it checks that the estimator is fitted
        labels: NDArray[Any] = self.classes_[best]
        return labels

    def to_classifier(self) -> Classifier:
        """Return a copy as a :class:`cofima.Classifier`, which can be saved and exported."""
        check_is_fitted(self, "model_")
        return Classifier(copy_model(self.model_))

    def _checked(self, X: ArrayLike, y: ArrayLike, *, first: bool) -> tuple[NDArray[Any], NDArray[Any]]:
        check_X_y(X, y, allow_nd=True, dtype=None, estimator=self)
        labels: NDArray[Any] = column_or_1d(y)
        check_classification_targets(labels)
        return self._checked_images(X, first=first), labels

    def _checked_images(self, X: ArrayLike, *, first: bool) -> NDArray[Any]:
        if np.asarray(X).ndim in (3, 4):
            return np.asarray(check_array(X, allow_nd=True, dtype=None))
        flat: NDArray[Any] = validate_data(self, X, reset=first)
        if first and self.image_shape is None:
            self.low_, self.high_ = flat.min(0), flat.max(0)
        if self.image_shape is not None and flat.shape[1] != math.prod(self.image_shape):
            raise ValueError(f"X has {flat.shape[1]} features, image_shape {self.image_shape} another number")
        return flat

    def _pixels(self, images: NDArray[Any]) -> Tensor:
        if images.ndim == 2 and self.image_shape is not None:
            images = images.reshape(-1, *self.image_shape)
            if images.max() > 1:  # check_array may have converted integers to floats
                images = images.astype(np.int64)
        elif images.ndim == 2:
            images = _squares(images, self.low_, self.high_)
        form = self.model_.view.pixel_format
        try:
            return torch.stack([form.encode(decode(image)) for image in images])
        except CofimaError as error:
            raise ValueError(str(error)) from error

    def _part(self, labels: Sequence[Any], pixels: Tensor, places: NDArray[Any]) -> Part:
        """Return the task of these classes; with ``fine_tune``, a share of the images is held out."""
        images = image_set(pixels, torch.from_numpy(np.asarray(places, dtype=np.int64)))
        content = [image.tobytes() for image in pixels.numpy()]
        often = Counter(content)
        copied = torch.tensor([often[image] > 1 for image in content])
        config = self.model_.config
        share = config.val_fraction if self.fine_tune else 0.0

        def how_many(count: int) -> int:
            return share_of(count, share) if share and count >= MIN_TO_HOLD_OUT else 0

        held = choose_images(images, how_many, config.seed) & ~copied
        choose = every_other(images.labels, held)
        train, may_choose, report = (images.select(mask) for mask in (~held, choose, held & ~choose))
        split = Split(train, may_choose, report, copied=copied.nonzero().flatten())
        return Part([str(label) for label in labels], split)

    def _learned(self, start: Callable[[], Model], before: Model | None, parts: Sequence[Part]) -> Model:
        """Return a model that has learned the parts, by the same path as ``cofima learn`` and ``extend``."""
        images = sum(len(part.everything) for part in parts)

        def begin() -> Model:
            model = start()
            model.data = {"name": "array", "train": images, "classes": len(model.classes)}
            return model

        effort = Effort(fast=not self.fine_tune, epochs_given=self.epochs is not None)
        learned = learn_parts(begin, before, parts, self.model_.config.train, KEEP, effort, SILENT)
        return learned.finished(KEEP)

    def _config(self) -> Config:
        """Return the configuration of a new model."""
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31 - 1)
        given = {
            "backbone": self.backbone,
            "method": self.method,
            "train.epochs": self.epochs,
            "seed": int(seed),
        }
        config = resolve("blobs", given, self.settings)
        return config.model_copy(update={"dataset": "array"})

    def __getstate__(self) -> dict[str, Any]:
        """Pickle a fitted model as the files of its model folder: plain bytes, no code."""
        state: dict[str, Any] = dict(super().__getstate__())
        if "model_" in state:
            with TemporaryDirectory() as folder:
                save_model(state["model_"], Path(folder))
                files = [path for path in Path(folder).rglob("*") if path.is_file()]
                state["model_"] = {str(path.relative_to(folder)): path.read_bytes() for path in files}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the model from the pickled files."""
        state = dict(state)
        if isinstance(files := state.get("model_"), dict):
            with TemporaryDirectory() as folder:
                for name, content in files.items():
                    path = Path(folder) / name
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(content)
                state["model_"] = load_model(folder)
        super().__setstate__(state)


def _squares(rows: NDArray[Any], low: NDArray[Any], high: NDArray[Any]) -> NDArray[np.float64]:
    """Render rows of features as square gray images in [0, 1], clipped to the range seen in ``fit``."""
    width = np.where(high > low, high - low, 1.0)
    gray = ((rows - low) / width).clip(0, 1)
    side = math.ceil(math.sqrt(rows.shape[1]))
    padded = np.zeros((len(rows), side * side))
    padded[:, : rows.shape[1]] = gray
    return padded.reshape(-1, side, side)
