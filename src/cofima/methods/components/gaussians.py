"""Class statistics: a Gaussian over the features of each class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cofima.methods.state import Entry

RIDGE = 1e-4  # added to each covariance, as SLCA does


@dataclass
class ClassGaussians:
    """A mean and the Cholesky factor of a covariance per class, in order of arrival.

    The factors are kept packed (lower triangle only) and are computed once: drawing from a class
    is one matrix product.
    """

    means: list[Tensor] = field(default_factory=list)
    packed: list[Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    shrunk: list[bool] = field(default_factory=list)
    """True if the covariance was shrunk, for lack of images."""

    def __len__(self) -> int:
        return len(self.means)

    def add(self, features: Tensor, *, shrink: bool = True) -> None:
        """Remember the next class by the features of its images [images, width]."""
        features = features.double().cpu()
        factor, shrunk = self._factor(features, shrink)
        self.packed.append(pack(factor))
        self.shrunk.append(shrunk)
        self.means.append(features.mean(0).float())
        self.counts.append(len(features))

    def pool(self, label: int, features: Tensor) -> None:
        """Add more images of a known class: the mean and covariance of old and new together, by counts."""
        features = features.double().cpu()
        old, new = self.counts[label], len(features)
        ridge = RIDGE * torch.eye(features.shape[1], dtype=torch.float64)
        mean, more = self.means[label].double(), features.mean(0)
        gap = (more - mean)[:, None]
        scatter = (old - 1) * (self.covariance(label).double() - ridge)
        scatter += (features - more).T @ (features - more) + old * new / (old + new) * gap @ gap.T
        covariance = scatter / (old + new - 1)
        factor = _cholesky(covariance + ridge)
        if factor is None:  # rounding, in a covariance of few images
            factor = torch.diag((covariance + ridge).diagonal().clamp(min=RIDGE).sqrt())
        rows, columns = torch.tril_indices(len(mean), len(mean))
        self.means[label] = (mean + new / (old + new) * gap[:, 0]).float()
        self.packed[label] = factor[rows, columns].float()
        self.counts[label] = old + new

    @torch.inference_mode()
    def nearest(self, features: Tensor) -> Tensor:
        """Return the Mahalanobis distance of each feature to the class that is nearest."""
        near = torch.full((len(features),), torch.inf)
        for label, mean in enumerate(self.means):
            away = torch.linalg.solve_triangular(self.factor(label), (features - mean).T, upper=False)
            near = torch.minimum(near, away.norm(dim=0))
        return near

    def factor(self, label: int) -> Tensor:
        """Return the lower triangular factor of a class's covariance."""
        return unpack(self.packed[label], len(self.means[label]))

    def covariance(self, label: int) -> Tensor:
        """Return a class's covariance."""
        factor = self.factor(label)
        return factor @ factor.T

    def state(self) -> dict[str, Tensor]:
        """Return everything as tensors."""
        if not self.means:
            return {}
        return {
            "means": torch.stack(self.means),
            "packed": torch.stack(self.packed),
            "counts": torch.tensor(self.counts),
            "shrunk": torch.tensor(self.shrunk),
        }

    @classmethod
    def restore(cls, state: dict[str, Tensor]) -> "ClassGaussians":
        """Return the statistics that :meth:`state` stored."""
        if not state:
            return cls()
        means, packed = list(state["means"]), list(state["packed"])
        return cls(means, packed, state["counts"].tolist(), state["shrunk"].tolist())

    def _factor(self, features: Tensor, shrink: bool) -> tuple[Tensor, bool]:
        """Factor the unbiased covariance; shrink it, and say so, where images are few or the factor fails."""
        count, width = features.shape
        ridge = RIDGE * torch.eye(width, dtype=torch.float64)
        if count > 1 and (count >= width / 4 or not shrink):
            factor = _cholesky(torch.cov(features.T) + ridge)
            if factor is not None:
                return factor, False
        if count > 1:
            from sklearn.covariance import LedoitWolf  # imported here: it takes a second, and few need it

            covariance = torch.from_numpy(LedoitWolf().fit(features.numpy()).covariance_)
        else:  # one image has no spread: borrow the mean spread of the other classes
            spread = [float(self.factor(label).square().sum()) / width for label in range(len(self))]
            covariance = torch.eye(width, dtype=torch.float64) * (sum(spread) / max(len(spread), 1))
        factor = _cholesky(covariance + ridge)
        return factor if factor is not None else torch.diag((covariance + ridge).diagonal().sqrt()), True


def pack(factor: Tensor) -> Tensor:
    """Return the lower triangle row by row, in single precision."""
    rows, columns = torch.tril_indices(len(factor), len(factor))
    return factor[rows, columns].float()


def unpack(packed: Tensor, width: int) -> Tensor:
    """Return the factor that :func:`pack` packed."""
    factor = torch.zeros(width, width)
    rows, columns = torch.tril_indices(width, width)
    factor[rows, columns] = packed
    return factor


def pooled(means: list[Tensor], factors: list[Tensor], counts: list[int]) -> tuple[Tensor, Tensor]:
    """Return mean and factor of the union of images that were remembered apart, in double precision.

    Exactly what :meth:`ClassGaussians.add` finds on all features at once, where nothing was shrunk.
    """
    weights = torch.tensor(counts, dtype=torch.float64)
    stack = torch.stack([mean.double() for mean in means])
    mean = (weights[:, None] * stack).sum(0) / weights.sum()
    ridge = RIDGE * torch.eye(len(mean), dtype=torch.float64)
    apart = stack - mean
    scatter = (weights[:, None] * apart).T @ apart
    for factor, count in zip(factors, counts, strict=True):
        scatter += (count - 1) * (factor.double() @ factor.double().T - ridge)
    covariance = scatter / (weights.sum() - 1) + ridge
    found = _cholesky(covariance)
    return mean, found if found is not None else torch.diag(covariance.diagonal().clamp(RIDGE).sqrt())


def pool_rows(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a class as one Gaussian where several models remember it: the rows of their states pooled."""
    counts = [int(row["counts"]) for row in rows]
    factors = [unpack(row["packed"], len(row["means"])) for row in rows]
    mean, factor = pooled([row["means"] for row in rows], factors, counts)
    shrunk = torch.stack([row["shrunk"] for row in rows]).any()
    count = torch.tensor(sum(counts))
    return {"means": mean.float(), "packed": pack(factor), "counts": count, "shrunk": shrunk}


GAUSSIANS = Entry("gaussians.", axis="class", merge="pool", pool=pool_rows)


def _cholesky(covariance: Tensor) -> Tensor | None:
    """Return the lower triangular factor, or None where the matrix is not positive definite."""
    result = torch.linalg.cholesky_ex(covariance)
    factor: Tensor = result.L
    return factor if not result.info and bool(torch.isfinite(factor).all()) else None


class Sampler:
    r"""Draw features of remembered classes, with the factors unpacked once and the means scaled.

    Means of older tasks shrink a little, :math:`s_c = 0.9 + 0.1\,\tau_c / t` with the 1-based task
    :math:`\tau_c` of the class, as SLCA found that fine-tuned features do.
    """

    def __init__(self, gaussians: ClassGaussians, task_of_class: Tensor, device: torch.device) -> None:
        scale = mean_scale(task_of_class)
        self.means = (torch.stack(gaussians.means) * scale[:, None]).to(device)
        self.factors = [gaussians.factor(label).T.contiguous().to(device) for label in range(len(gaussians))]
        self.device = device

    def draw_any(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw features with labels, each of any class as likely as of any other."""
        labels = torch.randint(len(self.means), (count,), generator=generator)
        return self.draw(torch.bincount(labels, minlength=len(self.means)).tolist(), generator)

    def draw(self, counts: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw ``counts[c]`` features of each class ``c``, class by class, with their labels."""
        noise = torch.randn(sum(counts), self.means.shape[1], generator=generator).to(self.device)
        features = torch.empty_like(noise)
        start = 0
        for label, count in enumerate(counts):
            if count:
                rows = slice(start, start + count)
                torch.addmm(self.means[label], noise[rows], self.factors[label], out=features[rows])
                start += count
        labels = torch.repeat_interleave(torch.tensor(counts)).to(self.device)
        return features, labels


def mean_scale(task_of_class: Tensor) -> Tensor:
    """Return the scale of each class's mean, from its task's 0-based index: 1 for the newest task."""
    newest = task_of_class.max() + 1
    return 0.9 + 0.1 * (task_of_class + 1) / newest
