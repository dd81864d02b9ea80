r"""A head behind a random projection, and the ridge regression that gives its weights.

With hidden features :math:`h = \mathrm{ReLU}(P^\top f)`, the sums :math:`G = \sum h h^\top` and
:math:`Q = \sum h y^\top` over all images so far hold everything that the regression needs:
:math:`W = (G + \rho I)^{-1} Q`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, relu

from cofima.core import distributed
from cofima.methods.components.eigen import eigh
from cofima.models.head import Head

RIDGES = tuple(10.0**power for power in range(-8, 9))
AT_ONCE = 1024  # rows or columns of hidden features in memory at a time


class ProjectedHead(Head):
    """A linear head on hidden features; the projection is drawn, never learned and never stored."""

    def __init__(
        self, features: int, width: int, generator: torch.Generator, sizes: Sequence[int] = ()
    ) -> None:
        super().__init__(width, sizes)
        self.matrix: Tensor
        self.register_buffer("matrix", torch.randn(features, width, generator=generator), persistent=False)

    def with_blocks(self, sizes: Sequence[int]) -> "ProjectedHead":
        """Return a head of these blocks behind the same projection, which is shared."""
        head = ProjectedHead.__new__(ProjectedHead)
        Head.__init__(head, self.features, sizes)
        head.register_buffer("matrix", self.matrix, persistent=False)
        return head

    def hidden(self, features: Tensor) -> Tensor:
        """Return the hidden features, in the precision and on the device of ``features``."""
        return relu(features @ self.matrix.to(features))

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of every class seen."""
        return super().forward(self.hidden(features))

    def sample(self) -> Tensor:
        """Return a few numbers of the projection, to recognize it by."""
        return self.matrix[-1, :16].cpu().clone()


@dataclass
class RidgeSums:
    """The sums of a ridge regression in float64; of the symmetric one only the lower triangle, packed."""

    packed: Tensor
    cross: Tensor

    @classmethod
    def empty(cls, width: int) -> "RidgeSums":
        """Return the sums over no image."""
        return cls(_zeros(width * (width + 1) // 2), _zeros(width, 0))

    def add_images(self, head: ProjectedHead, features: Tensor, labels: Tensor, classes: int) -> None:
        """Add images by their features; each of several processes sums its shard."""
        part = distributed.current_shard(len(labels))
        pairs = hidden_pairs(head, features[part.rows], labels[part.rows])
        self.add(pairs, classes, shared=part.shared)

    def add(self, pairs: Iterable[tuple[Tensor, Tensor]], classes: int, shared: bool = False) -> None:
        """Add hidden features [images, width] with labels; columns of new classes start at 0.

        If ``shared``, the sums of the other processes are added as well.
        """
        new = _zeros(len(self.cross), classes - self.cross.shape[1])
        self.cross = torch.cat([self.cross, new], dim=1)
        gram = self.gram()
        if shared and distributed.rank() > 0:  # what was summed before counts once
            gram, self.cross = gram.zero_(), self.cross.zero_()
        for hidden, labels in pairs:
            gram.addmm_(hidden.T, hidden)
            self.cross.index_add_(1, labels, hidden.T)
        if shared:
            gram, self.cross = distributed.all_reduce_sum(gram), distributed.all_reduce_sum(self.cross)
        for row, place in zip(gram, self._places(), strict=True):
            self.packed[place] = row[: place.stop - place.start]

    def gram(self) -> Tensor:
        """Return the symmetric sum with its lower triangle filled."""
        gram = _zeros(len(self.cross), len(self.cross))
        for row, place in zip(gram, self._places(), strict=True):
            row[: place.stop - place.start] = self.packed[place]
        return gram

    def solve(self, ridge: float) -> tuple[Tensor, float]:
        """Return the weights [classes, width], and the ridge, made larger until the sum can be factored."""
        while True:
            gram = self.gram()
            gram.diagonal().add_(ridge)
            factor, failed = torch.linalg.cholesky_ex(gram)
            del gram
            if not failed:
                return torch.cholesky_solve(self.cross, factor).T, ridge
            ridge *= 10

    def _places(self) -> list[slice]:
        return [slice(i * (i + 1) // 2, (i + 1) * (i + 2) // 2) for i in range(len(self.cross))]


def best_ridge(head: ProjectedHead, features: Tensor, labels: Tensor, chance: torch.Generator) -> float:
    """Return the ridge of the least error on a fifth of the images, fitted on the others."""
    order = torch.randperm(len(labels), generator=chance)
    train = max(1, int(0.8 * len(labels)))
    return least(held_out_errors(head, features[order], labels[order], train))


def least(errors: Tensor) -> float:
    """Return the ridge of the least error; the largest of those that differ by rounding only."""
    best = (errors <= errors.min() * (1 + 1e-9)).nonzero()
    return RIDGES[int(best.max())]


def held_out_errors(
    head: ProjectedHead, features: Tensor, labels: Tensor, train: int, dual: bool | None = None
) -> Tensor:
    r"""Return the mean squared error of each ridge on images after the first ``train``, fitted on these.

    One eigendecomposition serves all ridges: of :math:`H H^\top` (``dual``) or of :math:`H^\top H`,
    whichever is smaller. Directions that float64 cannot tell from 0 are left out.
    """
    targets = one_hot(labels - labels.min()).double()  # columns of other classes are 0, and so is their error
    dual = train <= head.features if dual is None else dual
    if dual:
        kernel = _kernel(head, features)
        values, vectors = eigh(kernel[:train, :train])
        left, right = kernel[train:, :train] @ vectors, vectors.T @ targets[:train]
    else:
        sums = RidgeSums.empty(head.features)
        sums.add(hidden_pairs(head, features[:train], labels[:train] - labels.min()), targets.shape[1])
        values, vectors = eigh(sums.gram())
        pairs = hidden_pairs(head, features[train:], labels[train:])
        left = torch.cat([hidden @ vectors for hidden, _ in pairs])
        right = vectors.T @ sums.cross
    known = values > values.max() * len(values) * torch.finfo(values.dtype).eps
    shrink = [torch.where(known, 1 / (values + ridge), 0.0) for ridge in RIDGES]
    return torch.stack([((left * s) @ right - targets[train:]).square().mean() for s in shrink])


def hidden_pairs(head: ProjectedHead, features: Tensor, labels: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield hidden features in float64 with their labels, some rows at a time."""
    for some, theirs in zip(torch.split(features, AT_ONCE), torch.split(labels, AT_ONCE), strict=True):
        yield head.hidden(some.double()), theirs


def _kernel(head: ProjectedHead, features: Tensor) -> Tensor:
    """Return the products of all pairs of hidden features, a few columns of them at a time."""
    kernel = _zeros(len(features), len(features))
    features = features.double()
    for columns in torch.split(head.matrix, AT_ONCE, dim=1):
        hidden = relu(features @ columns.to(features))
        kernel.addmm_(hidden, hidden.T)
    return kernel


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)
