r"""Class statistics: a Gaussian over the features of each class.

Of :math:`n` images with features of width :math:`d`, a covariance has rank :math:`n - 1` at most. Where
:math:`n < d/2` it is kept by that many rows :math:`U` [r, d] and one number,

.. math:: \Sigma = U^\top U + s I

which is exact, also where it is shrunk (Ledoit and Wolf, 2004), and takes :math:`4 d r` bytes; from
:math:`n = d/2` on by its Cholesky factor, packed, which takes :math:`2 d (d + 1)`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from cofima.methods.state import Entry
from cofima.weights.decompositions import svd

RIDGE = 1e-4  # added to each covariance, as SLCA does


@dataclass(frozen=True, eq=False)
class Gaussian:
    """The features of a class: their mean, and a covariance of few rows or a whole one.

    Attributes:
        mean: The mean [d].
        rows: U [r, d]; of a whole covariance the lower triangle of its factor, row by row, with zeros at
            the end, so that it has the width d too.
        spread: s, which is positive; 0 marks a whole covariance.
        count: Number of images.
        shrunk: True if the covariance was shrunk, for lack of images.
    """

    mean: Tensor
    rows: Tensor
    spread: float
    count: int
    shrunk: bool

    @property
    def whole(self) -> bool:
        """Return True if the factor of the covariance is kept, not a few rows."""
        return self.spread == 0

    @property
    def factor(self) -> Tensor:
        """Return the lower triangular factor of a whole covariance."""
        width = len(self.mean)
        factor = torch.zeros(width, width, dtype=self.rows.dtype)
        down, across = torch.tril_indices(width, width)
        factor[down, across] = self.rows.flatten()[: len(down)]
        return factor

    @property
    def span(self) -> tuple[Tensor, float]:
        """Return R and s of the covariance as R^T R + s I."""
        return (self.factor.T.contiguous(), 0.0) if self.whole else (self.rows, self.spread)

    @property
    def covariance(self) -> Tensor:
        """Return the covariance."""
        rows, spread = self.span
        return rows.T @ rows + spread * torch.eye(len(self.mean))

    @cached_property
    def variance(self) -> float:
        """Return the variance in a direction, as the mean over all."""
        return float(self.rows.double().square().sum()) / len(self.mean) + self.spread

    @cached_property
    def _axes(self) -> tuple[Tensor, Tensor]:
        """Return the orthonormal directions of the rows, and the variance along each but for the spread."""
        _, lengths, axes = svd(self.rows.double())
        return axes.float(), lengths.square().float()

    def distance(self, features: Tensor) -> Tensor:
        """Return the Mahalanobis distance of each feature to the mean."""
        away = features - self.mean
        if self.whole:
            solved: Tensor = torch.linalg.solve_triangular(self.factor, away.T, upper=False)
            return solved.square().sum(0).sqrt()
        # Along the axes and beside them. Woodbury's formula is the difference of two large numbers where
        # the spread is small, and is off by percents in single precision.
        axes, variances = self._axes
        along = away @ axes.T
        beside = (away - along @ axes).square().sum(1) / self.spread
        return (beside + (along.square() / (variances + self.spread)).sum(1)).sqrt()

    def moved(self, matrix: Tensor) -> "Gaussian":
        """Return the Gaussian of features that a linear map moves, as row vectors ``x @ matrix``.

        Exact, but for the spread of a covariance of few rows, which stays the same in all directions: it
        is scaled by the mean square of the map's stretches, which is exact for a rotation.
        """
        mean = (self.mean.double() @ matrix).float()
        if self.whole:
            upper = torch.linalg.qr(self.factor.double().T @ matrix, mode="r").R
            signs = torch.where(upper.diagonal() < 0, -1.0, 1.0)
            return replace(self, mean=mean, rows=pack((signs[:, None] * upper).T))
        spread = self.spread * float(matrix.square().sum()) / len(matrix)
        return replace(self, mean=mean, rows=(self.rows.double() @ matrix).float(), spread=spread)


def gaussian(features: Tensor, *, shrink: bool = True) -> Gaussian:
    """Return the Gaussian of a class's features [images, width]; a single image has no spread but the ridge.

    The unbiased covariance is shrunk, and marked, where the images are fewer than a quarter of the width
    (unless ``shrink`` is false) or where its factor fails.
    """
    features = features.double().cpu()
    (count, width), mean = features.shape, features.mean(0)
    centered = features - mean
    few = shrink and 1 < count < width / 4
    if count < width / 2:
        weight = ledoit_wolf(centered) if few else 0.0
        rows = math.sqrt((1 - weight) / (count if few else max(count - 1, 1))) * contrasts(centered)
        spread = RIDGE + weight * float(centered.square().sum()) / (count * width)
        return Gaussian(mean.float(), rows.float(), spread, count, few)
    ridge = RIDGE * torch.eye(width, dtype=torch.float64)
    factor = _cholesky(centered.T @ centered / max(count - 1, 1) + ridge)
    if factor is not None:
        return Gaussian(mean.float(), pack(factor), 0.0, count, False)
    weight, covariance = ledoit_wolf(centered), centered.T @ centered / count
    target = weight * float(covariance.trace()) / width * torch.eye(width, dtype=torch.float64)
    return Gaussian(mean.float(), pack(_factor((1 - weight) * covariance + target + ridge)), 0.0, count, True)


def pooled(one: Gaussian, two: Gaussian) -> Gaussian:
    """Return the Gaussian of the images of two together, by their counts.

    Exactly that of all features at once, where nothing was shrunk.
    """
    count, width = one.count + two.count, len(one.mean)
    shares = [(part.count - 1) / (count - 1) for part in (one, two)]
    gap = two.mean.double() - one.mean.double()
    mean = (one.mean.double() + two.count / count * gap).float()
    between = math.sqrt(one.count * two.count / (count * (count - 1))) * gap
    shrunk = one.shrunk or two.shrunk
    if not one.whole and not two.whole and len(one.rows) + len(two.rows) + 1 < width / 2:
        within = [math.sqrt(c) * part.rows.double() for c, part in zip(shares, (one, two), strict=True)]
        rows = torch.cat([*within, between[None]]).float()
        # the ridge is not a part of the images: it is taken out of both, and added once
        spread = RIDGE + sum(c * (part.spread - RIDGE) for c, part in zip(shares, (one, two), strict=True))
        return Gaussian(mean, rows, spread, count, shrunk)
    covariance = torch.outer(between, between)
    covariance += RIDGE * (1 - sum(shares)) * torch.eye(width, dtype=torch.float64)
    for share, part in zip(shares, (one, two), strict=True):
        rows, spread = part.span
        covariance += share * (rows.double().T @ rows.double())
        covariance.diagonal().add_(share * spread)
    return Gaussian(mean, pack(_factor(covariance)), 0.0, count, shrunk)


def contrasts(features: Tensor) -> Tensor:
    """Return one row less than there are images, with the same scatter around their mean: X_c^T X_c.

    Each row is the difference of an image to the mean of those before it, scaled (Helmert's contrasts).
    Unlike singular vectors they have a sign, and rounding does not turn them.
    """
    before = torch.arange(1, len(features), dtype=features.dtype)[:, None]
    return (features.cumsum(0)[:-1] - before * features[1:]) / (before * (before + 1)).sqrt()


def ledoit_wolf(centered: Tensor) -> float:
    r"""Return Ledoit and Wolf's weight of the identity for centered features X [n, d], from X X^T alone.

    With the squared norms :math:`q_i` of the images and :math:`\mu = \sum q_i / (n d)`,

    .. math:: \delta = \lVert X X^\top \rVert^2 / n^2 - d \mu^2, \qquad
              \beta = \left(\sum q_i^2 / n - \lVert X X^\top \rVert^2 / n^2\right) / n

    and the weight is :math:`\min(\beta, \delta) / \delta`.
    """
    count, width = centered.shape
    gram = centered @ centered.T if count <= width else centered.T @ centered
    norms = centered.square().sum(1)
    size = float(gram.square().sum()) / count**2
    delta = size - float(norms.sum()) ** 2 / (count**2 * width)
    beta = min((float(norms.square().sum()) / count - size) / count, delta)
    return beta / delta if beta > 0 else 0.0


class Gaussians(ABC):
    """A Gaussian for each class, in order of arrival."""

    @property
    @abstractmethod
    def means(self) -> list[Tensor]:
        """The mean of each class."""

    @property
    @abstractmethod
    def counts(self) -> list[int]:
        """The number of images of each class."""

    def __len__(self) -> int:
        return len(self.counts)

    @abstractmethod
    def add(self, features: Tensor) -> None:
        """Remember the next class by the features of its images [images, width]."""

    @abstractmethod
    def pool(self, label: int, features: Tensor) -> None:
        """Add more images of a known class."""

    @abstractmethod
    def move(self, matrix: Tensor) -> None:
        """Move all classes as a linear map moves features, as row vectors ``x @ matrix``."""

    @abstractmethod
    def nearest(self, features: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Return the Mahalanobis distance of each feature to the class that is nearest.

        ``left_out`` has the class of each image that is among those remembered, and -1 for others: its
        distance is the one that it would have if it were not, where sums tell that.
        """

    @abstractmethod
    def span(self, label: int) -> tuple[Tensor, float]:
        """Return R and s of a class's covariance as R^T R + s I."""

    def spans(self) -> list[tuple[Tensor, float]]:
        """Return R and s of every class."""
        return [self.span(label) for label in range(len(self))]

    def covariance(self, label: int) -> Tensor:
        """Return a class's covariance."""
        rows, spread = self.span(label)
        return rows.T @ rows + spread * torch.eye(rows.shape[1])

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return everything as tensors; nothing before the first class."""


@dataclass
class ClassGaussians(Gaussians):
    """Gaussians with a covariance each.

    Attributes:
        shrink: Shrink the covariance of a class of few images.
    """

    classes: list[Gaussian] = field(default_factory=list)
    shrink: bool = True
    _summed: tuple[int, float] = (0, 0.0)  # the classes whose variances are summed, and their sum

    @property
    def means(self) -> list[Tensor]:
        """The mean of each class."""
        return [one.mean for one in self.classes]

    @property
    def counts(self) -> list[int]:
        """The number of images of each class."""
        return [one.count for one in self.classes]

    @property
    def shrunk(self) -> list[bool]:
        """The classes whose covariance was shrunk."""
        return [one.shrunk for one in self.classes]

    def add(self, features: Tensor) -> None:
        """Remember the next class by the features of its images [images, width]."""
        if len(features) > 1:
            self.classes.append(gaussian(features, shrink=self.shrink))
            return
        # one image has no spread: borrow the mean variance of the other classes
        mean = features[0].cpu().float()
        rows = mean.new_zeros(0, len(mean))
        self.classes.append(Gaussian(mean, rows, self._mean_variance() + RIDGE, 1, True))

    def pool(self, label: int, features: Tensor) -> None:
        """Add more images of a known class: the mean and covariance of old and new together, by counts."""
        self.classes[label] = pooled(self.classes[label], gaussian(features, shrink=False))
        self._summed = (0, 0.0)

    def move(self, matrix: Tensor) -> None:
        """Move all classes as a linear map moves features, as row vectors ``x @ matrix``."""
        self.classes = [one.moved(matrix) for one in self.classes]
        self._summed = (0, 0.0)

    @torch.inference_mode()
    def nearest(self, features: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Return the Mahalanobis distance of each feature to the class that is nearest, with all images."""
        near = torch.full((len(features),), torch.inf)
        for one in self.classes:
            near = torch.minimum(near, one.distance(features))
        return near

    def span(self, label: int) -> tuple[Tensor, float]:
        """Return R and s of a class's covariance as R^T R + s I."""
        return self.classes[label].span

    def state(self) -> dict[str, Tensor]:
        """Return everything as tensors: one row a class, but for the rows of covariances."""
        if not self.classes:
            return {}
        return {
            "means": torch.stack(self.means),
            "rows": torch.cat([one.rows for one in self.classes]),
            "ranks": torch.tensor([len(one.rows) for one in self.classes]),
            "spreads": torch.tensor([one.spread for one in self.classes], dtype=torch.float64),
            "counts": torch.tensor(self.counts),
            "shrunk": torch.tensor(self.shrunk),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Tensor], *, shrink: bool = True) -> "ClassGaussians":
        """Return the statistics that :meth:`state` stored."""
        if not state:
            return cls(shrink=shrink)
        rows = torch.split(state["rows"], state["ranks"].tolist())
        columns = (state[key].tolist() for key in ("spreads", "counts", "shrunk"))
        return cls([Gaussian(*one) for one in zip(state["means"], rows, *columns, strict=True)], shrink)

    def _mean_variance(self) -> float:
        """Return the mean of the classes' variances; 0 of none."""
        known, total = self._summed
        for one in self.classes[known:]:
            total += one.variance
        self._summed = len(self), total
        return total / max(len(self), 1)


def pool_rows(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a class as one Gaussian where several models remember it: the rows of their states pooled."""
    made = None
    for row in rows:
        spread, count, shrunk = (row[key].item() for key in ("spreads", "counts", "shrunk"))
        one = Gaussian(row["means"], row["rows"], float(spread), int(count), bool(shrunk))
        made = one if made is None else pooled(made, one)
    assert made is not None
    state = ClassGaussians([made]).state()
    return {key: value if key == "rows" else value[0] for key, value in state.items()}


GAUSSIANS = Entry("gaussians.", axis="class", merge="pool", pool=pool_rows, ragged="rows", lengths="ranks")


def pack(factor: Tensor) -> Tensor:
    """Return the lower triangle row by row in rows of its width, zeros at the end, in single precision."""
    width = len(factor)
    down, across = torch.tril_indices(width, width)
    packed = factor.new_zeros(-(-len(down) // width), width)
    packed.view(-1)[: len(down)] = factor[down, across]
    return packed.float()


def by_class(features: Tensor, labels: Tensor) -> dict[int, Tensor]:
    """Return the features of each class, in their order."""
    order = torch.argsort(labels, stable=True)
    found, counts = torch.unique(labels, return_counts=True)
    return dict(zip(found.tolist(), torch.split(features[order], counts.tolist()), strict=True))


def _cholesky(covariance: Tensor) -> Tensor | None:
    """Return the lower triangular factor, or None where the matrix is not positive definite."""
    result = torch.linalg.cholesky_ex(covariance)
    factor: Tensor = result.L
    return factor if not result.info and bool(torch.isfinite(factor).all()) else None


def _factor(covariance: Tensor) -> Tensor:
    """Return the lower triangular factor; of the diagonal alone where rounding leaves no other."""
    found = _cholesky(covariance)
    return found if found is not None else torch.diag(covariance.diagonal().clamp(min=RIDGE).sqrt())


class Sampler:
    """Draw features of remembered classes, with the factors unpacked once and the means scaled."""

    def __init__(self, gaussians: Gaussians, device: torch.device, scale: Tensor | None = None) -> None:
        means = torch.stack(gaussians.means)
        self.means = (means if scale is None else means * scale[:, None]).to(device)
        self.spans = [(rows.to(device), spread) for rows, spread in gaussians.spans()]
        self.device = device

    def draw_any(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw features with labels, each of any class as likely as of any other."""
        labels = torch.randint(len(self.means), (count,), generator=generator)
        return self.draw(torch.bincount(labels, minlength=len(self.means)).tolist(), generator)

    def draw(self, counts: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw ``counts[c]`` features of each class ``c``, class by class, with their labels."""
        features = torch.empty(sum(counts), self.means.shape[1], device=self.device)
        parts = torch.split(features, counts)
        for mean, (rows, spread), part in zip(self.means, self.spans, parts, strict=True):
            if len(part):
                self._fill(part, mean, rows, spread, generator)
        return features, torch.repeat_interleave(torch.tensor(counts)).to(self.device)

    def _fill(
        self, out: Tensor, mean: Tensor, rows: Tensor, spread: float, generator: torch.Generator
    ) -> None:
        """Draw mean + R^T e + sqrt(s) e' with independent noise e of the rows and e' of all directions."""
        rank, width = rows.shape
        noise = torch.randn(len(out), rank + (width if spread else 0), generator=generator).to(self.device)
        torch.addmm(mean, noise[:, :rank], rows, out=out)
        if spread:
            out.add_(noise[:, rank:], alpha=math.sqrt(spread))


def mean_scale(task_of_class: Tensor) -> Tensor:
    r"""Return the scale of each class's mean, from its task's 0-based index: 1 for the newest task.

    Means of older tasks shrink a little, :math:`s_c = 0.9 + 0.1\,\tau_c / t` with the 1-based task
    :math:`\tau_c` of the class, as SLCA found that fine-tuned features do.
    """
    newest = task_of_class.max() + 1
    return 0.9 + 0.1 * (task_of_class + 1) / newest
