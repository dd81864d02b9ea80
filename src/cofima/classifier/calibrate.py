r"""Calibration of probabilities, and distances for the rejection of unknown classes.

A temperature :math:`T` and an offset :math:`o` per task are fitted on held-out features of all classes, old
and new (temperature: Guo et al., "On Calibration of Modern Neural Networks", ICML 2017,
https://arxiv.org/abs/1706.04599):

.. math:: p = \mathrm{softmax}((z + o) / T)

A class with many held-out images has its own offset, close to that of its task. Targets are smoothed, as a
few images cannot show that a classifier is never wrong. Classes are weighted equally, or by the method's
class prior.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima.classifier.scoring import draw_features, drawn_logits, gaussians_of
from cofima.store.model import Model

OWN_OFFSET = 20  # minimum number of held-out images for a class to have its own offset
SPREAD, OWN_SPREAD = 1.0, 0.5  # prior std of the offsets of tasks, and of classes around their task's, over T
LEAST, MOST = math.log(1e-3), math.log(1e3)  # bounds of log(T / std of the logits)
KEPT_DISTANCES = 100  # per class: enough for a share of one in a hundred


@dataclass(frozen=True, eq=False)
class Calibration:
    """A temperature, and an offset that is added to the logit of each class first."""

    temperature: float
    offsets: Tensor


def fit(logits: Tensor, labels: Tensor, task_of: Tensor, shares: Tensor | None = None) -> Calibration:
    """Return the calibration with the smallest cross-entropy.

    Gaussian priors keep the offsets of tasks near 0, and those of classes near their task's.

    Args:
        logits: Logits of held-out images [images, classes].
        labels: The class of each image.
        task_of: The task of each class.
        shares: Prior probability of each class; None for equal ones.
    """
    logits, classes, images = logits.double().clone(), len(task_of), len(labels)
    counts = torch.bincount(labels, minlength=classes)
    likely = torch.ones(classes, dtype=torch.float64) if shares is None else shares
    weights = images / (float(likely[counts > 0].sum()) * counts[labels].double()) * likely[labels]
    smooth = 1 / (images + 2)  # the rule of succession
    own = (counts >= OWN_OFFSET).nonzero().flatten()
    tasks = int(task_of.max()) + 1
    shared = tasks if tasks > 1 else 0  # softmax ignores an offset that all classes share
    scale = float(logits.std()) or 1.0

    def offsets(values: Tensor) -> Tensor:
        mine = values[:shared][task_of] if shared else torch.zeros(classes, dtype=torch.float64)
        return mine.index_add(0, own, values[shared:])

    def loss(values: Tensor) -> Tensor:
        scaled = logits / (scale * values[0].exp()) + offsets(values[1:])
        each = cross_entropy(scaled, labels, reduction="none", label_smoothing=smooth)
        spread = torch.tensor([SPREAD] * shared + [OWN_SPREAD] * len(own))
        return (weights * each).sum() + (values[1:] / spread).square().sum() / 2

    def with_gradient(point: Any) -> tuple[float, Any]:
        values = torch.tensor(point, dtype=torch.float64, requires_grad=True)
        value = loss(values)
        (gradient,) = torch.autograd.grad(value, values)
        return float(value.detach()), gradient.numpy()

    start = [0.0] * (1 + shared + len(own))
    bounds = [(LEAST, MOST), *[(None, None)] * (len(start) - 1)]
    with torch.enable_grad():
        best = minimize(with_gradient, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    found = torch.tensor(best, dtype=torch.float64)
    temperature = scale * math.exp(float(found[0]))
    return Calibration(temperature, (temperature * offsets(found[1:])).float())


def calibrate(model: Model, logits: Tensor, labels: Tensor) -> None:
    """Fit the calibration on held-out images, and on sampled features for classes without any.

    Without targets of a class, cross-entropy could only lower the offset of its task.

    Args:
        model: Its calibration is replaced in place.
        logits: Logits of held-out images, without the offsets of a calibration.
        labels: The class of each image.
    """
    for part in ("temperature", "offsets", "calibrated_on"):
        model.serving.pop(part, None)
    if not len(labels) or len(model.classes) < 2:
        return
    images, gaussians = len(labels), gaussians_of(model)
    counts = torch.bincount(labels, minlength=len(model.classes))
    each = max(1, round(float(counts[counts > 0].float().mean())))
    without: list[int] = [0 if count else each for count in counts.tolist()]
    if gaussians is not None and any(without):
        features, theirs = draw_features(gaussians, without, model)
        logits, labels = torch.cat([logits, drawn_logits(model, features)]), torch.cat([labels, theirs])
    found = fit(logits, labels, task_of_class(model), model.method.class_shares())
    model.serving["temperature"] = found.temperature
    if found.offsets.any():
        model.serving["offsets"] = found.offsets.tolist()
    model.serving["calibrated_on"] = {"images": images, "drawn_features": len(labels) - images}


def task_of_class(model: Model) -> Tensor:
    """Return the task of each class."""
    sizes = torch.tensor([len(task) for task in model.tasks])
    return torch.repeat_interleave(torch.arange(len(sizes)), sizes)


def honest_answers(model: Model, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the predicted classes of held-out images, each with a calibration fitted without it.

    This is two-fold cross-fitting: the calibration for each half of the images is fitted on the other half.
    """
    answers, tasks = logits.argmax(1), task_of_class(model)
    first = torch.arange(len(labels)) % 2 == 0
    for mine in (first, ~first):
        if len(tasks) > 1 and mine.any() and (~mine).any():
            found = fit(logits[~mine], labels[~mine], tasks, model.method.class_shares())
            answers[mine] = (logits[mine] + found.offsets).argmax(1)
    return answers


def remember_distances(model: Model) -> None:
    """Store the distance of each held-out image to its nearest Gaussian.

    Classes without held-out images keep their stored distances.
    """
    gaussians, held = gaussians_of(model), model.kept
    old = model.serving.get("distances", [])
    kept = old + [[] for _ in range(len(model.classes) - len(old))]
    if gaussians is not None and len(held):
        near = gaussians.nearest(held.features, torch.where(held.taught, held.labels, -1))
        for label in torch.unique(held.labels).tolist():
            mine = near[held.labels == label][:KEPT_DISTANCES]
            kept[label] = [round(value, 4) for value in mine.tolist()]
    model.serving["distances"] = kept


def farthest(model: Model, share: float) -> float | None:
    """Return the ``1 - share`` quantile of the distances of held-out images, or None if there are none."""
    values: list[float] = sorted(value for mine in model.serving.get("distances", []) for value in mine)
    if not values or gaussians_of(model) is None:
        return None
    return values[min(len(values) - 1, math.ceil((1 - share) * len(values)) - 1 if share < 1 else 0)]
