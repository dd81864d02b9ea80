r"""Linear discriminant analysis: class means, one shared covariance, and the resulting head.

With the means :math:`M` [d, C], the within-class scatter of all classes divided by :math:`N - C` as
:math:`S`, and the share :math:`a` of the identity,

.. math:: S_a = (1 - a) S + a \frac{\operatorname{tr} S}{d} I, \qquad
          W = S_a^{-1} M, \qquad b_c = -\tfrac12 \mu_c^\top S_a^{-1} \mu_c + \log \pi_c

Sums of several models, or of later images, are additive. They are kept in double precision: there is only
one matrix, not one per class, and every later task adds to it and solves with it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima.methods.components.gaussians import RIDGE, Gaussians, by_class
from cofima.methods.state import Entry
from cofima.models.head import power_normalized
from cofima.weights.decompositions import eigh

Priors = Literal["equal", "counts"]
Space = Literal["raw", "power"]
SHARES = (0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 1.0)  # candidates of leave-one-out
DOUBT = 0.01  # label smoothing of the leave-one-out loss: more confidence than this gains nothing
AT_ONCE = 1024  # images per chunk, to bound the memory for distances


@dataclass
class SharedGaussians(Gaussians):
    """Gaussians with one covariance shared by all classes.

    Attributes:
        width: Feature dimension.
        centers: Mean of each class, in double precision.
        sizes: Number of images of each class.
        scatter: Sum over all images of (x - mean)(x - mean)^T [d, d]; only its lower triangle is used.
        degrees: Degrees of freedom of ``scatter``, N - C; still includes those of removed classes.
        shrinkage: Share of the identity in the covariance.
        space: ``power`` if all features are power-normalized first.
        losses: Leave-one-out loss at each of ``SHARES``, summed over images.
    """

    width: int
    centers: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    scatter: Tensor = field(default_factory=lambda: torch.empty(0))
    degrees: int = 0
    shrinkage: float = 1.0
    space: Space = "raw"
    losses: Tensor = field(default_factory=lambda: torch.zeros(len(SHARES), dtype=torch.float64))
    _spectrum: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not len(self.scatter):
            self.scatter = torch.zeros(self.width, self.width, dtype=torch.float64)

    @property
    def means(self) -> list[Tensor]:
        """Mean of each class, in single precision."""
        return [mean.float() for mean in self.centers]

    @property
    def counts(self) -> list[int]:
        """Number of images of each class."""
        return self.sizes

    def prepare(self, features: Tensor) -> Tensor:
        """Return features of the backbone as the statistics see them, in double precision on the CPU."""
        features = features.double().cpu()
        return power_normalized(features) if self.space == "power" else features

    def add(self, features: Tensor) -> None:
        """Add the next class, given the features of its images [images, width]."""
        features = self.prepare(features)
        self.centers.append(features.mean(0))
        self.sizes.append(len(features))
        self._add_scatter(features - features.mean(0), len(features) - 1)

    def pool(self, label: int, features: Tensor) -> None:
        """Add more images of a known class; the result is as if all images had been added at once."""
        features = self.prepare(features)
        old, new = self.sizes[label], len(features)
        gap = features.mean(0) - self.centers[label]
        between = math.sqrt(old * new / (old + new)) * gap
        self._add_scatter(torch.cat([features - features.mean(0), between[None]]), new)
        self.centers[label] = self.centers[label] + new / (old + new) * gap
        self.sizes[label] = old + new

    def move(self, matrix: Tensor) -> None:
        """Apply a linear map of features, ``x @ matrix`` for row vectors, to all classes."""
        self.centers = [mean @ matrix for mean in self.centers]
        lower = self.scatter.tril()
        self.scatter = matrix.T @ (lower + lower.tril(-1).T) @ matrix

    def _add_scatter(self, rows: Tensor, degrees: int) -> None:
        self.scatter = self.scatter.addmm(rows.T, rows)
        self.degrees += degrees

    @property
    def within(self) -> Tensor:
        """S, the within-class covariance before shrinkage; 0 if every class has one image."""
        lower = self.scatter.tril()
        return (lower + lower.tril(-1).T) / max(self.degrees, 1)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return eigenvalues and eigenvectors of the scatter; cached until it changes."""
        if self._spectrum is None or self._spectrum[0] is not self.scatter:
            values, vectors = eigh(self.within * self.degrees)
            self._spectrum = (self.scatter, values.clamp(min=0), vectors)
        return self._spectrum[1:]

    def factor(self) -> Tensor:
        """Return the Cholesky factor of S_a, in double precision."""
        within = self.within
        variance = float(within.trace()) / self.width
        if variance == 0:  # no class has two different images: there is no scatter to estimate from
            return math.sqrt(RIDGE) * torch.eye(self.width, dtype=torch.float64)
        share = self.shrinkage
        while True:
            shrunk = (1 - share) * within
            shrunk.diagonal().add_(share * variance)
            found = torch.linalg.cholesky_ex(shrunk)
            if not found.info:
                factor: Tensor = found.L
                return factor
            share = min(1.0, 10 * share)  # too small a share: the matrix is singular up to rounding

    @torch.inference_mode()
    def nearest(self, features: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Return the Mahalanobis distance of each feature to its nearest class."""
        factor = self.factor()

        def white(rows: Tensor) -> Tensor:
            solved: Tensor = torch.linalg.solve_triangular(factor, rows.T, upper=False)
            return solved.T

        means = white(torch.stack(self.centers))
        features = self.prepare(features)
        parts = [torch.cdist(white(some), means).amin(1) for some in torch.split(features, AT_ONCE)]
        near = torch.cat(parts).float()
        if left_out is not None and (mine := left_out >= 0).any():
            near[mine] = self._nearest_left_out(features[mine], left_out[mine], factor)
        return near

    def _nearest_left_out(self, features: Tensor, labels: Tensor, factor: Tensor) -> Tensor:
        r"""Return leave-one-out distances of images that the statistics include.

        Without an image, its own class is farther away: with :math:`z = x - \mu_c` and
        :math:`a = z^\top S_a^{-1} z`, the squared distance is

        .. math:: \Big(\frac{n}{n-1}\Big)^2 \frac{a}{1 - \frac{1 - s}{N - C} \frac{n}{n-1} a}

        (Sherman-Morrison formula; s is the shrinkage). Distances to other classes are unchanged.
        """
        means = torch.stack(self.centers)
        counts = torch.tensor(self.sizes, dtype=torch.float64)[labels]
        less = counts / (counts - 1).clamp(min=1)
        white = torch.linalg.solve_triangular(factor, features.T, upper=False).T
        distances = torch.cdist(white, torch.linalg.solve_triangular(factor, means.T, upper=False).T)
        own = distances.gather(1, labels[:, None])[:, 0].square()
        down = (1 - self.shrinkage) / max(self.degrees, 1) * less
        alone = less.square() * own / (1 - down * own).clamp(min=1e-9)
        return distances.scatter(1, labels[:, None], alone.sqrt()[:, None]).amin(1).float()

    def span(self, label: int) -> tuple[Tensor, float]:
        """Return R and s of a class's covariance R^T R + s I."""
        return self.factor().T.contiguous().float(), 0.0

    def spans(self) -> list[tuple[Tensor, float]]:
        """Return the span of every class; all are equal."""
        return [self.span(0)] * len(self)

    def state(self) -> dict[str, Tensor]:
        """Return all statistics as tensors."""
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
    def restore(cls, state: Mapping[str, Tensor], width: int, space: Space = "raw") -> "SharedGaussians":
        """Return statistics from the result of :meth:`state`."""
        if not state:
            return cls(width, space=space)
        made = cls(width, list(state["classes.means"]), state["classes.counts"].tolist(), space=space)
        down, across = torch.tril_indices(width, width)
        made.scatter[down, across] = state["sums.scatter"]
        made.degrees, made.shrinkage = int(state["sums.degrees"]), float(state["shrinkage"])
        made.losses = state["sums.losses"]
        return made


def pool_means(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of a class over several models, weighted by their numbers of images."""
    counts = torch.stack([row["counts"] for row in rows])
    means = torch.stack([row["means"] for row in rows])
    return {"means": (counts[:, None] * means).sum(0) / counts.sum(), "counts": counts.sum()}


def _entries(group: str, predicts: str = "") -> tuple[Entry, ...]:
    return (
        Entry(f"{group}.classes.", axis="class", merge="pool", pool=pool_means),
        Entry(
            f"{group}.sums.",
            merge="sum",
            keeps_removed="the covariance that all classes share was measured on its images too",
        ),
        Entry(f"{group}.shrinkage", merge="last", predicts=predicts),
    )


GROUPS: dict[Space, str] = {"raw": "discriminant", "power": "power_discriminant"}  # names in the state
DISCRIMINANT = _entries(GROUPS["raw"])
POWER_DISCRIMINANT = _entries(GROUPS["power"], "power-normalized features")


def discriminant(gaussians: SharedGaussians, priors: Priors) -> tuple[Tensor, Tensor]:
    """Return weight [C, d] and bias [C] of the head, in double precision."""
    means = torch.stack(gaussians.centers)
    weight = torch.cholesky_solve(means.T, gaussians.factor()).T
    return weight, log_priors(gaussians, priors) - (weight * means).sum(1) / 2


def log_priors(gaussians: SharedGaussians, priors: Priors) -> Tensor:
    """Return the log prior of each class, up to a constant."""
    found = class_shares(gaussians.counts, priors)
    return torch.zeros(len(gaussians), dtype=torch.float64) if found is None else found.log()


def class_shares(counts: Sequence[int], priors: Priors) -> Tensor | None:
    """Return each class's share of all images; None for equal priors."""
    images = torch.tensor(counts, dtype=torch.float64)
    return None if priors == "equal" else images / images.sum()


def oas(within: Tensor, images: int) -> float:
    r"""Return the shrinkage of the oracle approximating shrinkage (OAS) estimator.

    Chen, Wiesel, Eldar and Hero, "Shrinkage Algorithms for MMSE Covariance Estimation", 2010,
    https://arxiv.org/abs/0907.4698, as implemented in scikit-learn:

    .. math:: \frac{\operatorname{tr} S^2 + \operatorname{tr}^2 S}
                   {(N + 1) (\operatorname{tr} S^2 - \operatorname{tr}^2 S / d)}

    Unlike that of Ledoit and Wolf, it needs no fourth moments, which the sums over images do not contain.
    """
    squares, square = float(within.square().sum()), float(within.trace()) ** 2
    below = (images + 1) * (squares - square / len(within))
    return min(1.0, (squares + square) / below) if below > 0 else 1.0


def choose_shrinkage(gaussians: SharedGaussians, losses: Tensor | None) -> float:
    """Return the share with the lowest leave-one-out loss; that of :func:`oas` if there are no losses."""
    if losses is None or not losses.any():
        return oas(gaussians.within, gaussians.degrees + len(gaussians))
    return SHARES[int(losses.argmin())]


def leave_one_out_losses(
    gaussians: SharedGaussians,
    features: Tensor,
    labels: Tensor,
    priors: Priors,
    shares: Sequence[float] = SHARES,
) -> Tensor | None:
    """Return the leave-one-out loss at each shrinkage of ``shares``, summed over images.

    The loss is taken at the best temperature, as that of a calibrated classifier: with fewer images than
    features, a discriminant is far too confident. Images without another one of their class are skipped;
    None if no images remain.
    """
    usable = torch.tensor(gaussians.counts)[labels] > 1
    features, labels = features[usable], labels[usable]
    if not len(labels) or gaussians.degrees < 2 or float(gaussians.scatter.trace()) == 0:
        return None
    parts = [found for _, found in _leave_one_out(gaussians, features, labels, shares, priors)]
    each = [calibrated_loss(torch.cat(scores), labels.cpu()) for scores in zip(*parts, strict=True)]
    return torch.tensor(each, dtype=torch.float64)


def discriminant_rows(features: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor] | None:
    """Return rows for a head that is trained on, as sure as it is right on images left out.

    Weight and bias of the discriminant of these images alone, with the shrinkage of the lowest leave-one-out
    loss, scaled by the best temperature there: without, a discriminant of few images is so sure of them that
    their loss, and with it every gradient, vanishes. Subtracting the mean row changes no probability.

    With fewer images than features, everything is solved in the space that the images span, where the rows
    lie. Shares of the identity there follow from its dimension.

    None if no image can be left out.
    """
    features, basis, shares = features.double(), None, list(SHARES)
    if len(features) < (width := features.shape[1]):
        basis, images = torch.linalg.qr(features.T).Q, len(features)
        features = features @ basis
        shares = [share * images / (share * images + (1 - share) * width) for share in shares]
    gaussians = SharedGaussians(features.shape[1])
    mine = by_class(features, labels)
    for label in range(classes):
        gaussians.add(mine[label])
    losses = leave_one_out_losses(gaussians, features, labels, "equal", shares)
    if losses is None:
        return None
    gaussians.shrinkage = shares[int(losses.argmin())]
    usable = torch.tensor(gaussians.counts)[labels] > 1
    parts = _leave_one_out(gaussians, features[usable], labels[usable], [gaussians.shrinkage], "equal")
    scale, _ = best_scale(torch.cat([scores[0] for _, scores in parts]), labels[usable])
    weight, bias = (scale * (rows - rows.mean(0)) for rows in discriminant(gaussians, "equal"))
    weight = weight if basis is None else weight @ basis.T
    return {"weight": weight.float(), "bias": bias.float()}


def calibrated_loss(scores: Tensor, labels: Tensor) -> float:
    """Return the label-smoothed cross-entropy at the best temperature, summed over images."""
    return best_scale(scores, labels)[1]


def best_scale(scores: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the factor of scores that minimizes their label-smoothed cross-entropy, and its sum there."""
    from scipy.optimize import minimize_scalar  # imported here: listing methods must not wait for scipy

    def loss(cold: float) -> float:
        warm = scores * math.exp(cold)
        return float(cross_entropy(warm, labels, reduction="sum", label_smoothing=DOUBT))

    found = minimize_scalar(loss, bounds=(-12, 3), method="bounded", options={"xatol": 0.01})
    return math.exp(found.x), float(found.fun)


def left_out_logits(
    gaussians: SharedGaussians, features: Tensor, labels: Tensor, priors: Priors, choose: bool
) -> Tensor | None:
    """Return leave-one-out logits of images that the statistics include [images, classes].

    If images ``choose`` the shrinkage, the logits of one half of them use the shrinkage chosen by the other
    half, rescaled to the head's own logits, since their scale depends strongly on the shrinkage. None if an
    image is the only one of its class, or if there is no variance.
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
    """Return the spread of logits: the root of their mean variance over classes."""
    return float(logits.var(1, correction=0).mean().sqrt()) or 1.0


def _leave_one_out(
    gaussians: SharedGaussians, features: Tensor, labels: Tensor, shares: Sequence[float], priors: Priors
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    r"""Yield labels and, for each shrinkage, leave-one-out logits of a chunk of images.

    Closed form, exact for a fixed share of the identity: without an image with :math:`z = x - \mu_c`, the
    scatter decreases by :math:`\frac{n}{n-1} z z^\top`, so that its inverse follows from the Sherman-Morrison
    formula, and the mean is :math:`\mu_c - z / (n-1)`. One eigendecomposition serves all shares.
    """
    counts, features = torch.tensor(gaussians.counts, dtype=torch.float64), gaussians.prepare(features)
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
