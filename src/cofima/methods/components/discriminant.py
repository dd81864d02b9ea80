r"""Linear discriminant analysis: class means and one covariance for all, and the head that they give.

With the means :math:`M` [d, C], the scatter within classes summed over all of them and divided by
:math:`N - C` as :math:`S`, and the share :math:`a` of the identity,

.. math:: S_a = (1 - a) S + a \frac{\operatorname{tr} S}{d} I, \qquad
          W = S_a^{-1} M, \qquad b_c = -\tfrac12 \mu_c^\top S_a^{-1} \mu_c + \log \pi_c

The sums of several models, and of later images, add up. They are kept in double precision: there is one
matrix, not one a class, and every later task adds to it and solves with it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima.methods.components.eigen import eigh
from cofima.methods.components.gaussians import RIDGE, Gaussians
from cofima.methods.state import Entry

Priors = Literal["equal", "counts"]
SHARES = (0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 1.0)  # among which images choose
DOUBT = 0.01  # share of answers that may be wrong anyhow: to be surer than that earns a share nothing
AT_ONCE = 1024  # images whose distances are in memory at a time


@dataclass
class SharedGaussians(Gaussians):
    """Gaussians with one covariance for all classes.

    Attributes:
        width: Number of features.
        centers: The mean of each class, in double precision.
        sizes: The number of images of each class.
        scatter: The sum over all images of (x - mean)(x - mean)^T [d, d]; only its lower triangle counts.
        degrees: Its degrees of freedom, N - C; it keeps those of a class that was removed.
        shrinkage: The share of the identity in the covariance.
        losses: The log-loss at each of ``SHARES``, summed over all images that were left out to choose.
    """

    width: int
    centers: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    scatter: Tensor = field(default_factory=lambda: torch.empty(0))
    degrees: int = 0
    shrinkage: float = 1.0
    losses: Tensor = field(default_factory=lambda: torch.zeros(len(SHARES), dtype=torch.float64))
    _spectrum: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not len(self.scatter):
            self.scatter = torch.zeros(self.width, self.width, dtype=torch.float64)

    @property
    def means(self) -> list[Tensor]:
        """The mean of each class."""
        return [mean.float() for mean in self.centers]

    @property
    def counts(self) -> list[int]:
        """The number of images of each class."""
        return self.sizes

    def add(self, features: Tensor) -> None:
        """Remember the next class by the features of its images [images, width]."""
        features = features.double().cpu()
        self.centers.append(features.mean(0))
        self.sizes.append(len(features))
        self._add_scatter(features - features.mean(0), len(features) - 1)

    def pool(self, label: int, features: Tensor) -> None:
        """Add more images of a known class, exactly as if they had been there from the start."""
        features = features.double().cpu()
        old, new = self.sizes[label], len(features)
        gap = features.mean(0) - self.centers[label]
        between = math.sqrt(old * new / (old + new)) * gap
        self._add_scatter(torch.cat([features - features.mean(0), between[None]]), new)
        self.centers[label] = self.centers[label] + new / (old + new) * gap
        self.sizes[label] = old + new

    def move(self, matrix: Tensor) -> None:
        """Move all classes as a linear map moves features, as row vectors ``x @ matrix``."""
        self.centers = [mean @ matrix for mean in self.centers]
        lower = self.scatter.tril()
        self.scatter = matrix.T @ (lower + lower.tril(-1).T) @ matrix

    def _add_scatter(self, rows: Tensor, degrees: int) -> None:
        self.scatter = self.scatter.addmm(rows.T, rows)
        self.degrees += degrees

    @property
    def within(self) -> Tensor:
        """Return S, the covariance within classes as it is; 0 where every class has one image."""
        lower = self.scatter.tril()
        return (lower + lower.tril(-1).T) / max(self.degrees, 1)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return eigenvalues and eigenvectors of the scatter; computed once as long as it stays the same."""
        if self._spectrum is None or self._spectrum[0] is not self.scatter:
            values, vectors = eigh(self.within * self.degrees)
            self._spectrum = (self.scatter, values.clamp(min=0), vectors)
        return self._spectrum[1:]

    def factor(self) -> Tensor:
        """Return the lower triangular factor of S_a, in double precision."""
        within = self.within
        variance = float(within.trace()) / self.width
        if variance == 0:  # no class has two images that differ: no direction is like another
            return math.sqrt(RIDGE) * torch.eye(self.width, dtype=torch.float64)
        share = self.shrinkage
        while True:
            shrunk = (1 - share) * within
            shrunk.diagonal().add_(share * variance)
            found = torch.linalg.cholesky_ex(shrunk)
            if not found.info:
                factor: Tensor = found.L
                return factor
            share = min(1.0, 10 * share)  # a share so small that rounding decides

    @torch.inference_mode()
    def nearest(self, features: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Return the Mahalanobis distance of each feature to the class that is nearest."""
        factor = self.factor()

        def white(rows: Tensor) -> Tensor:
            solved: Tensor = torch.linalg.solve_triangular(factor, rows.double().T, upper=False)
            return solved.T

        means = white(torch.stack(self.centers))
        parts = [torch.cdist(white(some), means).amin(1) for some in torch.split(features, AT_ONCE)]
        near = torch.cat(parts).float()
        if left_out is not None and (mine := left_out >= 0).any():
            near[mine] = self._nearest_left_out(features[mine], left_out[mine])
        return near

    def _nearest_left_out(self, features: Tensor, labels: Tensor) -> Tensor:
        r"""Return the distance of each image that is among those remembered, as if it were not.

        Its own class is farther without it: with :math:`z = x - \mu_c` and :math:`a = z^\top S_a^{-1} z`,

        .. math:: \Big(\frac{n}{n-1}\Big)^2 \frac{a}{1 - \frac{1 - s}{N - C} \frac{n}{n-1} a}

        (Sherman and Morrison's formula; s is the shrinkage). Other classes are as far as they are.
        """
        factor, means = self.factor(), torch.stack(self.centers)
        counts = torch.tensor(self.sizes, dtype=torch.float64)[labels]
        less = counts / (counts - 1).clamp(min=1)
        white = torch.linalg.solve_triangular(factor, features.double().T, upper=False).T
        distances = torch.cdist(white, torch.linalg.solve_triangular(factor, means.T, upper=False).T)
        own = distances.gather(1, labels[:, None])[:, 0].square()
        down = (1 - self.shrinkage) / max(self.degrees, 1) * less
        alone = less.square() * own / (1 - down * own).clamp(min=1e-9)
        return distances.scatter(1, labels[:, None], alone.sqrt()[:, None]).amin(1).float()

    def span(self, label: int) -> tuple[Tensor, float]:
        """Return R and s of a class's covariance as R^T R + s I."""
        return self.factor().T.contiguous().float(), 0.0

    def spans(self) -> list[tuple[Tensor, float]]:
        """Return the span of every class, which is the same one."""
        return [self.span(0)] * len(self)

    def state(self) -> dict[str, Tensor]:
        """Return everything as tensors."""
        if not self.centers:
            return {}
        down, across = torch.tril_indices(self.width, self.width)
        return {
            "classes.means": torch.stack(self.centers),
            "classes.counts": torch.tensor(self.sizes),
            "sums.scatter": self.scatter[down, across],
            "sums.degrees": torch.tensor(self.degrees),
            "sums.losses": self.losses,
            "shrinkage": torch.tensor(self.shrinkage, dtype=torch.float64),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Tensor], width: int) -> "SharedGaussians":
        """Return the statistics that :meth:`state` stored."""
        if not state:
            return cls(width)
        made = cls(width, list(state["classes.means"]), state["classes.counts"].tolist())
        down, across = torch.tril_indices(width, width)
        made.scatter[down, across] = state["sums.scatter"]
        made.degrees, made.shrinkage = int(state["sums.degrees"]), float(state["shrinkage"])
        made.losses = state["sums.losses"]
        return made


def pool_means(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of a class that several models remember, by their counts."""
    counts = torch.stack([row["counts"] for row in rows])
    means = torch.stack([row["means"] for row in rows])
    return {"means": (counts[:, None] * means).sum(0) / counts.sum(), "counts": counts.sum()}


DISCRIMINANT = (
    Entry("discriminant.classes.", axis="class", merge="pool", pool=pool_means),
    Entry(
        "discriminant.sums.",
        merge="sum",
        keeps_removed="the covariance that all classes share was measured on its images too",
    ),
    Entry("discriminant.shrinkage", merge="last"),
)


def discriminant(gaussians: SharedGaussians, priors: Priors) -> tuple[Tensor, Tensor]:
    """Return weight [C, d] and bias [C] of the head, in double precision."""
    means = torch.stack(gaussians.centers)
    weight = torch.cholesky_solve(means.T, gaussians.factor()).T
    return weight, log_priors(gaussians, priors) - (weight * means).sum(1) / 2


def log_priors(gaussians: SharedGaussians, priors: Priors) -> Tensor:
    """Return the logarithm of each class's probability before its image is seen, but for a constant."""
    found = class_shares(gaussians.counts, priors)
    return torch.zeros(len(gaussians), dtype=torch.float64) if found is None else found.log()


def class_shares(counts: Sequence[int], priors: Priors) -> Tensor | None:
    """Return the share of all images that each class has; None where classes count alike."""
    images = torch.tensor(counts, dtype=torch.float64)
    return None if priors == "equal" else images / images.sum()


def oas(within: Tensor, images: int) -> float:
    r"""Return the shrinkage of the oracle approximating estimator, from two traces and the number of images.

    Chen, Wiesel, Eldar and Hero, "Shrinkage Algorithms for MMSE Covariance Estimation", 2010,
    https://arxiv.org/abs/0907.4698, as scikit-learn has it:

    .. math:: \frac{\operatorname{tr} S^2 + \operatorname{tr}^2 S}
                   {(N + 1) (\operatorname{tr} S^2 - \operatorname{tr}^2 S / d)}

    Unlike Ledoit and Wolf's it needs no fourth moments, which sums over images do not keep.
    """
    squares, square = float(within.square().sum()), float(within.trace()) ** 2
    below = (images + 1) * (squares - square / len(within))
    return min(1.0, (squares + square) / below) if below > 0 else 1.0


def choose_shrinkage(gaussians: SharedGaussians, losses: Tensor | None) -> float:
    """Return the share with the least loss; the computed one where nothing could be left out, or compared."""
    if losses is None or not losses.any():
        return oas(gaussians.within, gaussians.degrees + len(gaussians))
    return SHARES[int(losses.argmin())]


def leave_one_out_losses(
    gaussians: SharedGaussians, features: Tensor, labels: Tensor, priors: Priors
) -> Tensor | None:
    """Return the log-loss at each of ``SHARES``, summed over images that are each classified by all others.

    The loss is that at the best temperature, as a calibrated classifier's: where there are fewer images than
    features, a discriminant is far too sure. Images that are the only ones of their class are left out; None
    if there are no others.
    """
    usable = torch.tensor(gaussians.counts)[labels] > 1
    features, labels = features[usable], labels[usable]
    if not len(labels) or gaussians.degrees < 2 or float(gaussians.within.trace()) == 0:
        return None
    parts = [found for _, found in _leave_one_out(gaussians, features, labels, SHARES, priors)]
    each = [calibrated_loss(torch.cat(scores), labels.cpu()) for scores in zip(*parts, strict=True)]
    return torch.tensor(each, dtype=torch.float64)


def calibrated_loss(scores: Tensor, labels: Tensor) -> float:
    """Return the cross-entropy at its best temperature, with some doubt in the labels, summed over images."""
    from scipy.optimize import minimize_scalar  # here: to describe methods must not wait for it

    def loss(cold: float) -> float:
        warm = scores * math.exp(cold)
        return float(cross_entropy(warm, labels, reduction="sum", label_smoothing=DOUBT))

    return float(minimize_scalar(loss, bounds=(-12, 3), method="bounded", options={"xatol": 0.01}).fun)


def left_out_logits(
    gaussians: SharedGaussians, features: Tensor, labels: Tensor, priors: Priors, choose: bool
) -> Tensor | None:
    """Return the logits of images that the statistics include, each by all but itself [images, classes].

    Where images ``choose`` the shrinkage, the answers to one half of them are those at the choice of the
    other half, on the scale of the head: at another shrinkage logits may be many times as large. None where
    an image is the only one of its class, or nothing varies.
    """
    counts = torch.tensor(gaussians.counts)
    if not len(labels) or int(counts[labels].min()) < 2 or gaussians.degrees < 2:
        return None
    shares = [gaussians.shrinkage] * 2
    first = torch.arange(len(labels)) % 2 == 0
    if choose and len(labels) > 1:
        halves = ((features[half], labels[half]) for half in (~first, first))
        shares = [
            choose_shrinkage(gaussians, leave_one_out_losses(gaussians, *half, priors)) for half in halves
        ]
    found = torch.empty(len(labels), len(counts), dtype=torch.float64)
    for half, share in zip((first, ~first), shares, strict=True):
        parts = _leave_one_out(gaussians, features[half], labels[half], [share, gaussians.shrinkage], priors)
        if half.any():
            chosen, own = (torch.cat(each) for each in zip(*(scores for _, scores in parts), strict=True))
            found[half] = chosen * (_spread(own) / _spread(chosen))
    return found.float()


def _spread(logits: Tensor) -> float:
    """Return how far logits are apart, as the root of their mean variance over classes."""
    return float(logits.var(1, correction=0).mean().sqrt()) or 1.0


def _leave_one_out(
    gaussians: SharedGaussians, features: Tensor, labels: Tensor, shares: Sequence[float], priors: Priors
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    r"""Yield labels and, for each shrinkage, logits of some images at a time, each by all but itself.

    Exact for a fixed share of the identity, in closed form: without an image with :math:`z = x - \mu_c`
    the scatter is less by :math:`\frac{n}{n-1} z z^\top`, whose inverse follows by Sherman and Morrison's
    formula, and the mean is :math:`\mu_c - z / (n-1)`. One eigendecomposition serves all shares.
    """
    counts, features = torch.tensor(gaussians.counts, dtype=torch.float64), features.double().cpu()
    values, vectors = gaussians.spectrum()
    means = torch.stack(gaussians.centers) @ vectors
    prior = counts.log() if priors == "counts" else torch.zeros_like(counts)
    for x, own in zip(torch.split(features, AT_ONCE), torch.split(labels, AT_ONCE), strict=True):
        x, n = x @ vectors, counts[own][:, None]
        z = x - means[own]
        less, rest = n / (n - 1), gaussians.degrees - 1
        variance = (values.sum() - less * z.square().sum(1, keepdim=True)) / (rest * gaussians.width)
        mine = means[own] - z / (n - 1)
        here = torch.log(n - 1) if priors == "counts" else torch.zeros_like(n)
        found = []
        for share in shares:
            inverse = 1 / ((1 - share) * values / rest + share * variance).clamp(min=1e-300)
            down = (1 - share) * less / rest
            gain = down / (1 - down * (z * inverse * z).sum(1, keepdim=True))
            to_x = gain * (z * inverse * x).sum(1, keepdim=True)
            along = (z * inverse) @ means.T
            scores = (x * inverse) @ means.T + to_x * along + prior
            scores -= (inverse @ means.square().T + gain * along.square()) / 2
            along = (z * inverse * mine).sum(1, keepdim=True)
            score = (x * inverse * mine).sum(1, keepdim=True) + to_x * along + here
            score -= ((mine * inverse * mine).sum(1, keepdim=True) + gain * along.square()) / 2
            found.append(scores.scatter(1, own[:, None], score))
        yield own, found
