"""Planes of weights against slow references: flat vectors, a QR decomposition and numpy's PCA."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from cofima.analysis.plane import Plane, principal, through
from cofima.core.errors import CofimaError
from cofima.weights import Weights, weight_distance

SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 2, 2)}


def make(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}


def vector(weights: Weights) -> np.ndarray:
    return np.concatenate([weights[key].double().numpy().ravel() for key in SHAPES])


def test_three_points_lie_in_their_plane_at_their_distances() -> None:
    points = [make(seed) for seed in range(3)]
    plane, corners = through(*points)
    for point, corner in zip(points, corners, strict=True):
        x, y, away = plane.coordinates(point)
        assert (x, y) == pytest.approx(corner, abs=1e-12)
        assert away == pytest.approx(0, abs=1e-6)
    for i in range(3):
        for j in range(3):
            drawn = np.hypot(corners[i][0] - corners[j][0], corners[i][1] - corners[j][1])
            assert drawn == pytest.approx(weight_distance(points[i], points[j]), rel=1e-9, abs=1e-12)


def test_coordinates_are_those_of_a_qr_decomposition() -> None:
    points = [make(seed) for seed in range(3)]
    plane, _ = through(*points)
    base, one, two = map(vector, points)
    q, r = np.linalg.qr(np.stack([one - base, two - base], 1))
    q = q * np.sign(np.diag(r))
    other = make(7)
    expected = q.T @ (vector(other) - base)
    beside = np.linalg.norm(vector(other) - base - q @ expected)
    assert plane.coordinates(other) == pytest.approx((*expected, beside), rel=1e-9)


@pytest.mark.parametrize("make_plane", [lambda p: through(*p[:3])[0], principal])
def test_a_place_has_the_coordinates_it_was_made_from(make_plane: Callable[[list[Weights]], Plane]) -> None:
    plane = make_plane([make(seed) for seed in range(5)])
    x, y, away = plane.coordinates(plane.weights(1.25, -0.5))
    assert (x, y, away) == pytest.approx((1.25, -0.5, 0), abs=1e-5)  # weights are float32


def test_the_principal_plane_is_that_of_all_points() -> None:
    points = [make(seed) for seed in range(6)]
    plane = principal(points)
    vectors = np.stack([vector(point) for point in points])
    centered = vectors - vectors.mean(0)
    _, values, axes = np.linalg.svd(centered, full_matrices=False)
    expected = centered @ axes[:2].T
    expected *= np.sign(expected[-1])
    found = np.array([plane.coordinates(point)[:2] for point in points])
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert plane.kept == pytest.approx((values[:2] ** 2).sum() / (values**2).sum())


def test_points_on_a_line_span_no_plane() -> None:
    a, b = make(0), make(1)
    middle = {key: (a[key].double() + b[key].double()) / 2 for key in a}
    for first, second, third in ((a, a, b), (a, b, a), (a, b, b)):
        with pytest.raises(CofimaError, match="span no plane"):
            through(first, second, third)
    wide = [{key: value.double() for key, value in point.items()} for point in (a, b)]
    with pytest.raises(CofimaError, match="span no plane"):
        through(wide[0], wide[1], middle)
    with pytest.raises(CofimaError, match="span no plane"):
        principal([a, b, a, b])
