"""Accuracy and confused classes of a model on labeled images."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cofima.classifier.scoring import Accuracy, logits_of, read_known, to_probabilities
from cofima.core.progress import SILENT, Progress
from cofima.store.model import Model


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        source: The folder or CSV file of the images.
        classes: All classes of the model, in order.
        accuracy: Accuracy per class.
        matrix: Confusion matrix: number of images by true class (rows) and predicted class (columns).
        calibration: Expected calibration error (ECE, ten bins), in percentage points.
        mistakes: Image files of each confused pair (true class, predicted class).
    """

    source: Path
    classes: list[str]
    accuracy: Accuracy
    matrix: Tensor
    calibration: float
    mistakes: dict[tuple[str, str], list[Path]]

    @property
    def images(self) -> int:
        """Number of images."""
        return int(self.matrix.sum())

    @property
    def confused(self) -> list[tuple[str, str, int]]:
        """Triples (true class, predicted class, number of images), most confused first."""
        counts = [(true, said, len(files)) for (true, said), files in self.mistakes.items()]
        return sorted(counts, key=lambda row: (-row[2], row[0], row[1]))


def evaluate(
    model: Model,
    photos: Path,
    *,
    only_known: bool = False,
    skip_unreadable: bool = False,
    progress: Progress = SILENT,
) -> Evaluation:
    """Evaluate a model on a folder or CSV file; of a folder with train and test, on its test part."""
    read = read_known(
        model,
        photos,
        "test",
        only_known=only_known,
        advice="\nTo leave such classes out, give --only-known.",
        skip_unreadable=skip_unreadable,
        progress=progress,
    )
    classes = model.classes
    images = read.images(classes)
    labels, logits = images.labels, logits_of(model, images, "evaluation")
    answers = logits.argmax(1)
    many = len(classes)
    matrix = torch.bincount(labels * many + answers, minlength=many * many).view(many, many)
    mistakes: dict[tuple[str, str], list[Path]] = {}
    for file, true, said in zip(read.files, labels.tolist(), answers.tolist(), strict=True):
        if true != said:
            mistakes.setdefault((classes[true], classes[said]), []).append(file.path)
    chance = to_probabilities(model, logits).amax(1)
    accuracy = Accuracy.of(answers, labels, classes)
    return Evaluation(
        photos, classes, accuracy, matrix, calibration_error(chance, answers == labels), mistakes
    )


def calibration_error(probability: Tensor, right: Tensor, bins: int = 10) -> float:
    """Return the expected calibration error (ECE) over equal bins, in percentage points."""
    place = (probability * bins).long().clamp(max=bins - 1)
    sums = torch.zeros(bins, dtype=torch.float64)
    sums.index_add_(0, place, probability.double() - right.double())
    return 100 * float(sums.abs().sum()) / len(probability)
