r"""Calibration of probabilities, and distances by which images of unknown classes are recognized.

One temperature :math:`T` is fitted on images that were not trained on (Guo et al., "On Calibration of
Modern Neural Networks", ICML 2017, https://arxiv.org/abs/1706.04599),

.. math:: p = \mathrm{softmax}(z / T)

with smoothed targets, as few images cannot show that a classifier never errs.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima.classifier.scoring import draw_features, features_of, gaussians_of, logits_of, logits_of_features
from cofima.data.image_set import ImageSet
from cofima.store.model import Model

LEAST, MOST = 1e-3, 1e3
STEPS = 60
KEPT_DISTANCES = 100  # of each class: enough for a share of one in a hundred


def temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature with the smallest cross-entropy, by golden section in its logarithm.

    Of n images the target leaves 1 / (n + 2) to the other classes: the rule of succession.
    """
    smooth, logits = 1 / (len(labels) + 2), logits.double()

    def loss(log: float) -> float:
        return float(cross_entropy(logits / math.exp(log), labels, label_smoothing=smooth))

    low, high, ratio = math.log(LEAST), math.log(MOST), (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = loss(a), loss(b)
    for _ in range(STEPS):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = loss(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = loss(b)
    return math.exp((low + high) / 2)


def calibrate(model: Model, images: ImageSet) -> None:
    """Fit the temperature on held-out images, and on features drawn from the Gaussians of classes without."""
    if not len(images) or len(model.classes) < 2:
        return
    logits, labels = logits_of(model, images, "calibration"), images.labels
    counts = torch.bincount(labels, minlength=len(model.classes))
    gaussians, each = gaussians_of(model), max(1, round(float(counts[counts > 0].float().mean())))
    without: list[int] = [0 if count else each for count in counts.tolist()]
    if gaussians is not None and any(without):
        features, more = draw_features(gaussians, without, model)
        logits = torch.cat([logits, logits_of_features(model, features)])
        labels = torch.cat([labels, more])
    model.serving["temperature"] = temperature(logits, labels)
    model.serving["calibrated_on"] = {"images": len(images), "drawn_features": sum(without)}


def remember_distances(model: Model, images: ImageSet) -> None:
    """Store the distances of held-out images to the nearest Gaussian; classes without any keep theirs."""
    gaussians = gaussians_of(model)
    old = model.serving.get("distances", [])
    kept = old + [[] for _ in range(len(model.classes) - len(old))]
    if gaussians is not None and len(images):
        near = gaussians.nearest(features_of(model, images))
        for label in images.counts():
            mine = near[images.labels == label][:KEPT_DISTANCES]
            kept[label] = [round(value, 4) for value in mine.tolist()]
    model.serving["distances"] = kept


def farthest(model: Model, share: float) -> float | None:
    """Return the distance that all but ``share`` of the held-out images stay below, or None without any."""
    values: list[float] = sorted(value for mine in model.serving.get("distances", []) for value in mine)
    if not values or gaussians_of(model) is None:
        return None
    return values[min(len(values) - 1, math.ceil((1 - share) * len(values)) - 1 if share < 1 else 0)]
