r"""A head of Mahalanobis distances, each class with a correlation matrix of its own.

The covariance of n features [d], shrunk as FeCAM does it, is of low rank but for a multiple of the identity:
with the centered features :math:`X` and :math:`\mathbf 1` the vector of ones,

.. math:: S = \tfrac1{n-1} X^\top X + \gamma_1 v\, I + \gamma_2 m\, (\mathbf 1 \mathbf 1^\top - I)
            = V\, \mathrm{diag}(l)\, V^\top + a\, I, \qquad a = \gamma_1 v - \gamma_2 m

where :math:`v` is the mean of the covariance's diagonal, :math:`m` that of its other entries, and
:math:`V` an orthonormal basis of at most n + 1 directions. So a class takes d (n + 1) numbers instead of
:math:`d^2`, and a distance as many products. The correlation matrix is
:math:`R = D^{-1} S D^{-1}` with the deviations :math:`D^2 = \mathrm{diag}(S)`, and
:math:`z^\top R^{-1} z = y^\top S^{-1} y` with :math:`y = D z`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from cofima.methods.components.eigen import eigh
from cofima.methods.state import Entry
from cofima.models.head import Head

CORRELATION = Entry("correlation.", axis="class", predicts="a correlation matrix of each class")
FLAT = 1e-6  # of the mean variance: where S has less, it is taken to have no inverse


@dataclass(frozen=True)
class Correlation:
    """The correlation matrix of one class, as the module's equations have it.

    Attributes:
        deviation: The square roots of S's diagonal [d].
        basis: The directions V [d, r].
        along: The inverse of S along them, 1 / (l + a) [r]; 0 where S is nearly 0, as in a pseudo-inverse.
        across: The inverse of S in all other directions, 1 / a.
    """

    deviation: Tensor
    basis: Tensor
    along: Tensor
    across: Tensor

    @classmethod
    def of(cls, features: Tensor, gamma_1: float, gamma_2: float) -> "Correlation":
        """Return the matrix of a class's transformed features [n, d]; the identity where they are equal."""
        features = features.double()
        count, width = features.shape
        x = (features - features.mean(0)) / max(count - 1, 1) ** 0.5
        variances = x.square().sum(0)
        mean = float(variances.mean())
        if not mean > 0:  # one image, or several that are the same
            return cls(torch.ones(width), torch.zeros(width, 0), torch.zeros(0), torch.tensor(1.0))
        others = (float(x.sum(1).square().sum()) - width * mean) / max(width * (width - 1), 1)
        ones = torch.ones(1, width, dtype=torch.float64)
        basis, parts = torch.linalg.qr(torch.cat([x, ones]).T)
        weights = torch.ones(count + 1, dtype=torch.float64)
        weights[-1] = gamma_2 * others
        lengths, rotation = eigh((parts * weights) @ parts.T)
        # Correlations do not depend on the scale of the features: in units of the mean variance, they are
        # of a size that suits single precision.
        floor = gamma_1 - gamma_2 * others / mean
        deviation = (variances / mean + gamma_1).sqrt()
        spectrum = torch.cat([lengths / mean + floor, torch.tensor([floor])])
        inverse = torch.where(spectrum > FLAT, 1 / spectrum, 0.0).float()
        return cls(deviation.float(), (basis @ rotation).float().contiguous(), inverse[:-1], inverse[-1])

    def distances(self, away: Tensor) -> Tensor:
        """Return the squared Mahalanobis distance of each difference [images, d] from 0."""
        y, basis = away * self.deviation.to(away), self.basis.to(away)
        along = y @ basis
        rest = y - along @ basis.T  # not |y|² - |along|², which cancels
        return rest.square().sum(1) * self.across.to(away) + along.square() @ self.along.to(away)


class MahalanobisHead(Head):
    """Negative squared distances of transformed features to class means; the rows of the head are the means.

    Attributes:
        power: Exponent of each feature (Tukey); 1 leaves it as it is.
        matrices: The correlation matrix of each class.
    """

    def __init__(self, features: int, sizes: Sequence[int] = ()) -> None:
        super().__init__(features, sizes)
        self.power = 1.0
        self.matrices: list[Correlation] = []

    def transformed(self, features: Tensor) -> Tensor:
        """Return features to the power, at unit length."""
        return normalize(features if self.power == 1 else features.clamp(min=0) ** self.power)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of every class seen: the nearer, the larger."""
        if not self.matrices:
            return features.new_zeros(len(features), 0)
        z, means = self.transformed(features), self.flat()["weight"].to(features)
        pairs = zip(self.matrices, means, strict=True)
        return -torch.stack([matrix.distances(z - mean) for matrix, mean in pairs], dim=1)

    def state(self) -> dict[str, Tensor]:
        """Return the matrices as tensors with one row a class, filled up with zeros to the largest rank."""
        ranks = [len(matrix.along) for matrix in self.matrices]
        room = [max(ranks, default=0) - rank for rank in ranks]
        pairs = list(zip(self.matrices, room, strict=True))
        if not pairs:
            return {}
        return {
            "deviation": torch.stack([matrix.deviation for matrix in self.matrices]),
            "basis": torch.stack([pad(matrix.basis, (0, more)) for matrix, more in pairs]),
            "along": torch.stack([pad(matrix.along, (0, more)) for matrix, more in pairs]),
            "across": torch.stack([matrix.across for matrix in self.matrices]),
            "ranks": torch.tensor(ranks),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the matrices that :meth:`state` returned.

        They are copied: the last bits of a product depend on where in memory its operands begin.
        """
        parts = ("deviation", "basis", "along", "across", "ranks")
        rows = zip(*(state.get(key, ()) for key in parts), strict=True)
        self.matrices = [
            Correlation(deviation.clone(), basis[:, :rank].clone(), along[:rank].clone(), across.clone())
            for deviation, basis, along, across, rank in rows
        ]
