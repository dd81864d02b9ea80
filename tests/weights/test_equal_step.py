"""Equal steps: the length that the scale gives, its laws, and steps that no scale reaches."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import cofima
from cofima.core.errors import CofimaError
from cofima.weights import average, equal_step, fisher_average, weight_distance
from cofima.weights.ops import CHUNK

shares = st.floats(0.02, 0.98)
seeds = st.integers(0, 10_000)


def normal(seed: int, size: int = 50) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(seed: int, spread: float = 3.0, size: int = 50) -> list[dict[str, Tensor]]:
    """Return old and new weights and their Fishers, which differ by many orders of magnitude."""
    weights = [normal(4 * seed + k, size) for k in (0, 1)]
    fishers = [(spread * normal(4 * seed + k, size)).exp() for k in (2, 3)]
    return [
        {"a": value[: size // 3], "b": value[size // 3 :].reshape(-1, 1)} for value in (*weights, *fishers)
    ]


def share_of_way(old, new, f_old, f_new, lam: float, scale: float) -> float:
    step = fisher_average(old, new, f_old, f_new, lam, scale=scale)
    return weight_distance(old, step) / weight_distance(old, new)


@given(seeds, shares, st.floats(0, 8))
def test_the_step_is_lam_of_the_way(seed: int, lam: float, spread: float) -> None:
    given_ = drawn(seed, spread)
    found = equal_step(*given_, lam)
    assert found.reached
    assert found.share == pytest.approx(lam, rel=1e-6)
    assert share_of_way(*given_, lam, found.scale) == pytest.approx(lam, rel=1e-6)


@given(seeds, shares, st.floats(-8, 8), st.floats(0.1, 4))
def test_a_larger_scale_is_a_longer_step(seed: int, lam: float, at: float, more: float) -> None:
    short, far = (share_of_way(*drawn(seed), lam, math.exp(x)) for x in (at, at + more))
    assert short < far


@given(seeds, shares)
def test_equal_fishers_need_no_scale(seed: int, lam: float) -> None:
    old, new, fisher, _ = drawn(seed)
    found = equal_step(old, new, fisher, fisher, lam)
    assert found.scale == pytest.approx(1, rel=1e-6)
    step = fisher_average(old, new, fisher, fisher, lam, scale=found.scale)
    torch.testing.assert_close(step, average(old, new, lam), rtol=1e-6, atol=1e-7)


@given(seeds, shares, st.floats(-30, 30), st.booleans())
def test_constant_factors_of_fishers_cancel(seed: int, lam: float, power: float, first: bool) -> None:
    old, new, f_old, f_new = drawn(seed)
    plain = equal_step(old, new, f_old, f_new, lam)
    larger = {key: value * 10**power for key, value in (f_old if first else f_new).items()}
    pair = (larger, f_new) if first else (f_old, larger)
    scaled = equal_step(old, new, *pair, lam)
    torch.testing.assert_close(
        fisher_average(old, new, *pair, lam, scale=scaled.scale),
        fisher_average(old, new, f_old, f_new, lam, scale=plain.scale),
        rtol=1e-5,
        atol=1e-6,
    )


@given(seeds, shares)
def test_the_scale_is_that_of_a_slow_bisection(seed: int, lam: float) -> None:
    old, new, f_old, f_new = drawn(seed)
    d, a, b = (
        torch.cat([x[k].flatten() for k in ("a", "b")])
        for x in ({k: new[k] - old[k] for k in old}, f_old, f_new)
    )
    low, high = -100.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        alpha = lam * math.exp(middle) * b / (lam * math.exp(middle) * b + (1 - lam) * a)
        low, high = (middle, high) if (alpha * d).norm() < lam * d.norm() else (low, middle)
    assert equal_step(old, new, f_old, f_new, lam).scale == pytest.approx(math.exp(low), rel=1e-5)


@pytest.mark.parametrize("lam", [0, 1, 0.3])
def test_the_ends_and_weights_that_did_not_move(lam: float) -> None:
    old, new, f_old, f_new = drawn(1)
    if lam in (0, 1):
        assert equal_step(old, new, f_old, f_new, lam) == cofima.weights.EqualStep(1.0, lam, reached=True)
    assert equal_step(old, old, f_old, f_new, lam) == cofima.weights.EqualStep(1.0, lam, reached=True)


def parts(*triples: tuple[float, float, float]) -> list[dict[str, Tensor]]:
    """Return weights that move by d, with their two Fishers."""
    d, f_old, f_new = (torch.tensor(column) for column in zip(*triples, strict=True))
    return [{"w": value} for value in (torch.zeros_like(d), d, f_old, f_new)]


def test_where_both_fishers_are_zero_the_share_is_lam() -> None:
    found = equal_step(*parts((1.0, 0, 0), (2.0, 0, 0)), 0.3)
    assert (found.scale, found.reached) == (1.0, True)
    assert found.share == pytest.approx(0.3)
    mixed = parts((1.0, 0, 0), (2.0, 1, 5))  # the other weight then has the share lam, too
    assert equal_step(*mixed, 0.3).scale == pytest.approx(1 / 5, rel=1e-6)


def test_a_step_that_is_too_long_or_too_short_at_every_scale() -> None:
    """The weight with F_new = 0 never moves, that with F_old = 0 always does; the rest comes near."""
    never = parts((3.0, 1, 0), (1.0, 1, 1))
    found = equal_step(*never, 0.9)
    assert not found.reached
    assert found.share == pytest.approx(1 / math.sqrt(10))
    moved = fisher_average(*never, 0.9, scale=found.scale)["w"]
    torch.testing.assert_close(moved, torch.tensor([0.0, 1.0]))
    always = parts((3.0, 0, 1), (1.0, 1, 1))
    found = equal_step(*always, 0.1)
    assert not found.reached
    assert found.share == pytest.approx(3 / math.sqrt(10))
    moved = fisher_average(*always, 0.1, scale=found.scale)["w"]
    torch.testing.assert_close(moved, torch.tensor([3.0, 0.0]))
    nothing = equal_step(*parts((1.0, 1, 0), (1.0, 1, 0)), 0.4)  # no weight depends on the scale
    assert (nothing.scale, nothing.share, nothing.reached) == (1.0, 0.0, False)


def test_buffers_and_new_rows_do_not_count(same_bits) -> None:
    old, new, f_old, f_new = drawn(3)
    plain = equal_step(old, new, f_old, f_new, 0.4)
    more_old = old | {"running_var": torch.ones(3), "count": torch.tensor(1)}
    more_new = new | {"running_var": 9 * torch.ones(3), "count": torch.tensor(5), "head": torch.ones(4)}
    assert equal_step(more_old, more_new, f_old, f_new | {"head": torch.ones(4)}, 0.4) == plain


def test_operands_are_left_alone_and_chunks_do_not_matter(same_bits) -> None:
    operands = drawn(5, size=2 * CHUNK + 77)
    copies = [{key: value.clone() for key, value in part.items()} for part in operands]
    found = equal_step(*operands, 0.2)
    for part, copy in zip(operands, copies, strict=True):
        same_bits(part, copy)
    assert share_of_way(*operands, 0.2, found.scale) == pytest.approx(0.2, rel=1e-6)


@given(seeds, shares)
def test_fishers_at_the_ends_of_single_precision(seed: int, lam: float) -> None:
    old, new, f_old, f_new = drawn(seed, spread=1.0)
    f_old = {key: (value * 1e-36).float() for key, value in f_old.items()}
    f_new = {key: (value * 1e35).float() for key, value in f_new.items()}
    assume(all(bool((f > 0).all()) for part in (f_old, f_new) for f in part.values()))
    found = equal_step(old, new, f_old, f_new, lam)
    assert share_of_way(old, new, f_old, f_new, lam, found.scale) == pytest.approx(lam, rel=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    old, new, f_old, f_new = drawn(1)
    with pytest.raises(CofimaError, match="lam must lie"):
        equal_step(old, new, f_old, f_new, 1.5)
    with pytest.raises(CofimaError, match="does not fit"):
        equal_step(old, new, f_old, {"a": f_new["a"]}, 0.5)
    with pytest.raises(CofimaError, match="must be finite"):
        equal_step(old, new, f_old, f_new | {"a": -f_new["a"]}, 0.5)
    with pytest.raises(CofimaError, match="must be positive"):
        fisher_average(old, new, f_old, f_new, 0.5, scale=0.0)
