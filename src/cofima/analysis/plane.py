r"""Planes in weight space: two coordinates for every network, and its distance from the plane.

A plane is spanned by differences of given networks, :math:`D_j = P_j - P_0`, and stored as coefficients of
these, so that no direction of the size of a network is stored. Inner products are in double precision.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cofima.core.errors import CofimaError
from cofima.weights.ops import Weights, chunks

Floats = NDArray[np.float64]
FLAT = 1e-6  # relative to the longest side: points this close to a line span a plane only by rounding


@dataclass(frozen=True)
class Plane:
    """An origin and two orthonormal axes, as coefficients of the differences of points from the first."""

    points: Sequence[Weights]
    gram: Floats
    origin: Floats
    axes: Floats
    kept: float = 1.0
    """Share of the points' variance that lies in the plane."""

    def coordinates(self, weights: Mapping[str, Tensor]) -> tuple[float, float, float]:
        """Return the coordinates of weights in the plane, and their distance from it."""
        base = self.points[0]
        inner = np.array([_inner(base, weights, point) for point in self.points[1:]])
        away = inner - self.gram @ self.origin
        x, y = (float(axis @ away) for axis in self.axes)
        square = _inner(base, weights, weights) - 2 * self.origin @ inner
        square += self.origin @ self.gram @ self.origin
        return x, y, math.sqrt(max(0.0, float(square) - x * x - y * y))

    @torch.no_grad()
    def weights(self, x: float, y: float) -> Weights:
        """Return the weights at a point of the plane, computed in double precision."""
        shares = self.origin + x * self.axes[0] + y * self.axes[1]
        made: Weights = {}
        for key, base in self.points[0].items():
            total = base.double()
            for share, point in zip(shares, self.points[1:], strict=True):
                total = total.add(point[key].to(base.device).double() - base.double(), alpha=float(share))
            made[key] = total.to(base.dtype)
        return made


def through(first: Weights, second: Weights, third: Weights) -> tuple[Plane, list[tuple[float, float]]]:
    """Return the plane through three points, and their coordinates.

    The first point is the origin, the second lies on the first axis, the third above it.
    """
    points = [first, second, third]
    gram = _gram(points)
    along = gram[0, 1] / gram[0, 0] if gram[0, 0] > 0 else 0.0
    height = gram[1, 1] - along * gram[0, 1]
    if gram[0, 0] <= 0 or height <= (FLAT**2) * gram.max():
        raise CofimaError("the three networks lie on one line (did the backbone move?): they span no plane")
    one, two = math.sqrt(gram[0, 0]), math.sqrt(height)
    axes = np.array([[1 / one, 0.0], [-along / two, 1 / two]])
    corners = [(0.0, 0.0), (one, 0.0), (float(gram[0, 1]) / one, two)]
    return Plane(points, gram, np.zeros(2), axes), corners


def principal(points: Sequence[Weights]) -> Plane:
    """Return the plane of best fit: the first two principal components of the points."""
    gram = _gram(points)
    count = len(points)
    whole = np.zeros((count, count))
    whole[1:, 1:] = gram
    center = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(center @ whole @ center)
    values, vectors = values[::-1], vectors[:, ::-1]
    if values[1] <= (FLAT**2) * max(values[0], 0.0):
        raise CofimaError("the networks lie on one line (did the backbones move?): they span no plane")
    # the sign of an eigenvector is arbitrary: choose the one that puts the last point on the positive side
    signs = np.where(vectors[-1] < 0, -1.0, 1.0)
    axes = np.array([signs[k] * center @ vectors[:, k] / math.sqrt(values[k]) for k in (0, 1)])
    kept = float(values[:2].sum() / values.clip(0).sum())
    return Plane(points, gram, np.full(count - 1, 1 / count), axes[:, 1:], kept)


def _gram(points: Sequence[Weights]) -> Floats:
    """Return the inner products of all differences from the first point."""
    base, others = points[0], points[1:]
    gram = np.zeros((len(others), len(others)))
    for i, a in enumerate(others):
        for j, b in enumerate(others[: i + 1]):
            gram[i, j] = gram[j, i] = _inner(base, a, b)
    return gram


@torch.no_grad()
def _inner(base: Mapping[str, Tensor], a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the inner product of ``a - base`` and ``b - base``, computed in chunks."""
    total = 0.0
    for key, value in base.items():
        start, one, two = (part.reshape(-1).to(value.device) for part in (value, a[key], b[key]))
        for at in chunks(start):
            zero = start[at].double()
            total += float((one[at].double() - zero) @ (two[at].double() - zero))
    return total
