"""Averages of weights: the laws they keep, and slow obvious computations that they equal."""

import math
import sys
import warnings
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn

import cofima
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.weights import (
    auto_lambda,
    average,
    average_all,
    fisher_average,
    fisher_average_all,
    snapshot,
    weight_distance,
)
from cofima.weights.ops import CHUNK

settings.register_profile("laws", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("laws")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
inner = st.floats(0.01, 0.99)
shares = st.one_of(st.sampled_from([0.0, 1.0, 0.5]), st.floats(0, 1))


def values(low: float = -(2.0**100), high: float = 2.0**100, width: int = 32, size: int = 7):
    """Draw one weight tensor; both signs, zeros and values of very different size occur."""
    elements = st.floats(low, high, width=width, allow_nan=False, allow_subnormal=False)
    kind = np.float32 if width == 32 else np.float64
    return arrays.arrays(kind, size, elements=elements).map(torch.from_numpy)


def fishers(top: float = 1e6, size: int = 7):
    """Draw one Fisher tensor: exact zeros, and normal floats over many orders of size."""
    element = st.one_of(st.just(0.0), st.floats(-20, math.log10(top)).map(lambda e: 10.0**e))
    return st.lists(element, min_size=size, max_size=size).map(lambda x: torch.tensor(x, dtype=torch.float32))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def one(value: Tensor) -> dict[str, Tensor]:
    return {"w": value}


def eq7(old: Tensor, new: Tensor, f_old: Tensor, f_new: Tensor, lam: float) -> Tensor:
    """Eq. 7 as printed, in float64, element by element, with the agreed value for 0/0."""
    result = []
    for a, b, fa, fb in zip(*(t.double().flatten().tolist() for t in (old, new, f_old, f_new)), strict=True):
        top, bottom = lam * fb * b + (1 - lam) * fa * a, lam * fb + (1 - lam) * fa
        result.append(top / bottom if bottom > 0 else lam * b + (1 - lam) * a)
    return torch.tensor(result, dtype=torch.float64).view(old.shape)


# --- the plain average, Eq. 3 ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fisher", [False, True])
def test_endpoints_are_bit_exact(dtype: torch.dtype, fisher: bool, subtests: pytest.Subtests) -> None:
    for scale in (1e-30, 1.0, 1e30):
        with subtests.test(scale=scale):
            assert_exact_endpoints(dtype, scale, fisher)


def assert_exact_endpoints(dtype: torch.dtype, scale: float, fisher: bool) -> None:
    scale = min(max(scale, 1e-5), 1e4) if dtype == torch.float16 else scale
    old = one((random(501, seed=1, dtype=torch.float64) * scale).to(dtype))
    new = one((random(501, seed=2, dtype=torch.float64) * scale * 1e-3).to(dtype))
    for lam, end in ((0.0, old), (1.0, new), (0, old), (1, new)):
        if fisher:
            f = one(random(501, seed=3).abs()), one(random(501, seed=4).abs())
            merged = fisher_average(old, new, *f, lam)["w"]
        else:
            merged = average(old, new, lam)["w"]
        assert merged.dtype == dtype
        assert torch.equal(merged, end["w"])
        assert merged.data_ptr() not in (old["w"].data_ptr(), new["w"].data_ptr())


@pytest.mark.parametrize("dtype", DTYPES)
def test_endpoints_hold_at_the_ends_of_the_range(dtype: torch.dtype) -> None:
    """The difference of the two is infinite, the endpoints are not."""
    most = torch.finfo(dtype).max
    old, new = torch.tensor([-most, most, 0.0], dtype=dtype), torch.tensor([most, -most, most], dtype=dtype)
    f = one(torch.tensor([0.0, 1.0, 1.0]))
    for lam, end in ((0, old), (1, new)):
        assert torch.equal(average(one(old), one(new), lam)["w"], end)
        assert torch.equal(fisher_average(one(old), one(new), f, f, lam)["w"], end)


@given(values(), values(), shares)
def test_average_stays_between_its_operands(old: Tensor, new: Tensor, lam: float) -> None:
    merged = average(one(old), one(new), lam)["w"]
    assert bool((merged >= torch.minimum(old, new)).all())
    assert bool((merged <= torch.maximum(old, new)).all())


@given(values(-1e3, 1e3), values(-1e3, 1e3), shares)
def test_average_is_the_formula(old: Tensor, new: Tensor, lam: float) -> None:
    exact = (1 - lam) * old.double() + lam * new.double()
    scale = torch.maximum(old.abs(), new.abs()).double()
    assert bool(((average(one(old), one(new), lam)["w"].double() - exact).abs() <= 4e-7 * scale).all())


@given(st.integers(2, 12), st.integers(0, 1000))
def test_a_share_of_one_over_t_gives_the_mean(tasks: int, seed: int) -> None:
    models = [one(random(9, seed=seed * 100 + t, dtype=torch.float64)) for t in range(tasks)]
    running = models[0]
    for t, model in enumerate(models[1:], start=2):
        running = average(running, model, 1 / t)
    mean = torch.stack([m["w"] for m in models]).mean(0)
    torch.testing.assert_close(running["w"], mean, rtol=1e-12, atol=1e-12)


@given(st.integers(1, 10), inner)
def test_unrolled_coefficients_sum_to_one_and_count_the_first_model_once(tasks: int, lam: float) -> None:
    basis = torch.eye(tasks, dtype=torch.float64)
    running = one(basis[0])
    for t in range(1, tasks):
        running = average(running, one(basis[t]), lam)
    later = [lam * (1 - lam) ** (tasks - k) for k in range(2, tasks + 1)]
    expected = torch.tensor([(1 - lam) ** (tasks - 1), *later], dtype=torch.float64)
    torch.testing.assert_close(running["w"], expected, rtol=1e-12, atol=1e-14)
    assert float(running["w"].sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lam", [0.1, 0.4, 0.5, 0.9])
def test_half_precision_is_averaged_in_float32_and_rounded_once(dtype: torch.dtype, lam: float) -> None:
    old, new = random(CHUNK + 77, seed=1).to(dtype), random(CHUNK + 77, seed=2).to(dtype)
    expected = torch.lerp(old.float(), new.float(), lam).to(dtype)
    assert torch.equal(average(one(old), one(new), lam)["w"], expected)
    f_old, f_new = random(CHUNK + 77, seed=3).square(), random(CHUNK + 77, seed=4).square()
    exact = eq7(old[-99:], new[-99:], f_old[-99:], f_new[-99:], lam)
    merged = fisher_average(one(old), one(new), one(f_old), one(f_new), lam)["w"]
    assert merged.dtype == dtype
    step = torch.finfo(dtype).eps * exact.abs().clamp(min=1e-3)
    assert bool(((merged[-99:].double() - exact).abs() <= 0.51 * step).all())


def test_a_different_precision_on_each_side_gives_the_new_one() -> None:
    old, new = random(5, seed=1, dtype=torch.float64), random(5, seed=2, dtype=torch.float16)
    merged = average(one(old), one(new), 0.25)["w"]
    assert merged.dtype == torch.float16
    torch.testing.assert_close(merged.double(), 0.75 * old + 0.25 * new.double(), rtol=1e-3, atol=1e-3)


# --- keys, buffers, shapes ------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0, 0.3, 1])
@pytest.mark.parametrize("fisher", [False, True])
def test_new_rows_and_integer_buffers_come_from_the_new_weights(lam: float, fisher: bool) -> None:
    old = {"w": random(3, seed=1), "count": torch.tensor(4), "mask": torch.tensor([True, False])}
    new = {"w": random(3, seed=2), "head": random(2, 3, seed=3) * 1e-30}
    new |= {"count": torch.tensor(9), "mask": torch.tensor([False, False])}
    f = {"w": torch.ones(3)}
    merged = (
        fisher_average(old, new, f, f | {"head": torch.zeros(2, 3)}, lam)
        if fisher
        else average(old, new, lam)
    )
    assert list(merged) == list(new)
    assert torch.equal(merged["head"], new["head"])
    assert torch.equal(merged["count"], new["count"])
    assert torch.equal(merged["mask"], new["mask"])
    assert merged["head"].data_ptr() != new["head"].data_ptr()
    assert merged["count"].data_ptr() != new["count"].data_ptr()


def test_float_buffers_without_fisher_are_averaged_plainly() -> None:
    old = {"w": random(3, seed=1), "running_mean": random(3, seed=2)}
    new = {"w": random(3, seed=3), "running_mean": random(3, seed=4)}
    merged = fisher_average(old, new, {"w": torch.zeros(3)}, {"w": torch.ones(3)}, 0.3)
    assert torch.equal(merged["w"], new["w"])
    assert torch.equal(merged["running_mean"], average(old, new, 0.3)["running_mean"])


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (CHUNK,), (CHUNK + 1,), (3, CHUNK // 2 + 5)])
def test_every_shape_is_averaged_to_its_last_element(shape: tuple[int, ...]) -> None:
    old, new = random(*shape, seed=1), random(*shape, seed=2)
    f_old, f_new = random(*shape, seed=3).square(), random(*shape, seed=4).square()
    assert torch.equal(average(one(old), one(new), 0.3)["w"], torch.lerp(old, new, 0.3))
    merged = fisher_average(one(old), one(new), one(f_old), one(f_new), 0.3)["w"]
    assert merged.shape == shape
    share = 0.3 * f_new / (0.3 * f_new + 0.7 * f_old)
    torch.testing.assert_close(merged, torch.lerp(old, new, share), rtol=1e-5, atol=1e-6)


def test_every_misfit_is_named_at_once() -> None:
    old = {"a": torch.ones(2), "b": torch.ones(2, 3), "gone": torch.ones(1)}
    new = {"a": torch.ones(3), "b": torch.ones(3, 2)}
    with pytest.raises(CofimaError) as caught:
        average(old, new, 0.5)
    said = str(caught.value)
    assert "'a': old shape [2], new shape [3]" in said
    assert "'b': old shape [2, 3], new shape [3, 2]" in said
    assert "'gone'" in said
    for call in (
        lambda: average_all([one(torch.ones(2)), one(torch.ones(3))]),
        lambda: weight_distance(one(torch.ones(2)), one(torch.ones(3))),
        lambda: auto_lambda(one(torch.ones(2)), one(torch.ones(3)), {}, {}),
        lambda: auto_lambda(one(torch.ones(4)), one(torch.ones(4)), one(torch.ones(1)), one(torch.ones(1))),
        lambda: auto_lambda(one(torch.ones(4)), one(torch.ones(4)), {}, one(torch.ones(4))),
    ):
        with pytest.raises(CofimaError, match="'w'"):
            call()


@pytest.mark.parametrize("lam", [-0.1, 1.1, float("nan"), float("inf"), -1e-12])
def test_a_share_outside_0_to_1_is_refused(lam: float) -> None:
    w, f = one(torch.ones(2)), one(torch.ones(2))
    with pytest.raises(CofimaError, match="lam must lie between 0 and 1"):
        average(w, w, lam)
    with pytest.raises(CofimaError, match="lam must lie between 0 and 1"):
        fisher_average(w, w, f, f, lam)


# --- weighted by Fisher information, Eq. 7 --------------------------------------------------------


@given(values(-1e3, 1e3), values(-1e3, 1e3), fishers(), fishers(), inner)
def test_fisher_average_is_the_formula(o: Tensor, n: Tensor, fo: Tensor, fn: Tensor, lam: float) -> None:
    exact = eq7(o, n, fo, fn, lam)
    merged = fisher_average(one(o), one(n), one(fo), one(fn), lam)["w"]
    scale = torch.maximum(o.abs(), n.abs()).double()
    assert bool(((merged.double() - exact).abs() <= 2e-6 * scale).all())


@given(values(), values(), fishers(1e30), fishers(1e30), shares)
@example(*[torch.ones(7)] * 4, sys.float_info.min)  # (1 - lam) / lam is no float32
def test_fisher_average_is_finite_and_between(
    o: Tensor, n: Tensor, fo: Tensor, fn: Tensor, lam: float
) -> None:
    merged = fisher_average(one(o), one(n), one(fo), one(fn), lam)["w"]
    assert bool(torch.isfinite(merged).all())
    assert bool((merged >= torch.minimum(o, n)).all())
    assert bool((merged <= torch.maximum(o, n)).all())


@given(values(-1e3, 1e3), values(-1e3, 1e3), fishers(), inner)
def test_equal_fishers_give_the_plain_average(o: Tensor, n: Tensor, f: Tensor, lam: float) -> None:
    merged = fisher_average(one(o), one(n), one(f), one(f), lam)["w"]
    plain = average(one(o), one(n), lam)["w"]
    scale = torch.maximum(o.abs(), n.abs())
    assert bool(((merged - plain).abs() <= 1e-6 * scale).all())


@given(values(-1e3, 1e3), values(-1e3, 1e3), fishers(1e3), fishers(1e3), inner, st.integers(-30, 30))
def test_the_common_scale_of_both_fishers_does_not_matter(
    o: Tensor, n: Tensor, fo: Tensor, fn: Tensor, lam: float, power: int
) -> None:
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    scaled = [f.double() * 10.0**power for f in (fo, fn)]
    normal = [(s == 0) | ((s > 2 * tiny) & (s < huge / 2)) for s in scaled]
    keep = normal[0] & normal[1]
    a = fisher_average(one(o), one(n), one(fo), one(fn), lam)["w"][keep]
    scaled = [torch.where(keep, s, 1.0).float() for s in scaled]
    b = fisher_average(one(o), one(n), one(scaled[0]), one(scaled[1]), lam)["w"][keep]
    scale = torch.maximum(o.abs(), n.abs())[keep]
    assert bool(((a - b).abs() <= 2e-6 * scale).all())


@pytest.mark.parametrize("power", [-30, -10, 0, 10, 30])
def test_scale_invariance_in_double_precision_fishers(power: int) -> None:
    """A Fisher in float64 may leave the range of float32: what counts is only its ratio."""
    o, n = one(random(50, seed=1)), one(random(50, seed=2))
    fo, fn = (
        random(50, seed=3, dtype=torch.float64).square(),
        random(50, seed=4, dtype=torch.float64).square(),
    )
    expected = fisher_average(o, n, one(fo), one(fn), 0.4)["w"]
    scale = 10.0 ** (2 * power)  # 1e-60 to 1e60
    found = fisher_average(o, n, one(fo * scale), one(fn * scale), 0.4)["w"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@given(values(), values(), fishers(), inner)
def test_a_zero_fisher_gives_the_other_side(o: Tensor, n: Tensor, f: Tensor, lam: float) -> None:
    f, zero = f + 1e-12, torch.zeros_like(f)
    assert torch.equal(fisher_average(one(o), one(n), one(f), one(zero), lam)["w"], o)
    assert torch.equal(fisher_average(one(o), one(n), one(zero), one(f), lam)["w"], n)
    plain = average(one(o), one(n), lam)["w"]
    assert torch.equal(fisher_average(one(o), one(n), one(zero), one(zero), lam)["w"], plain)


def test_equal_weights_stay_as_they_are_whatever_the_fisher() -> None:
    w = one(random(200, seed=1))
    for seed in range(5):
        f = one(random(200, seed=seed).square()), one(random(200, seed=seed + 9).square())
        assert torch.equal(fisher_average(w, w, *f, 0.37)["w"], w["w"])


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), -1e-30])
@pytest.mark.parametrize("side", [0, 1])
def test_an_impossible_fisher_is_refused_by_name(bad: float, side: int) -> None:
    w = {"fine": torch.ones(3), "layer.weight": torch.ones(4)}
    f = [{"fine": torch.ones(3), "layer.weight": torch.ones(4)} for _ in range(2)]
    f[side]["layer.weight"][2] = bad
    with pytest.raises(CofimaError, match=r"Fisher of 'layer\.weight' must be finite and not negative"):
        fisher_average(w, w, *f, 0.5)
    with pytest.raises(CofimaError, match=r"'layer\.weight'"):
        fisher_average_all([w, w], f)


@pytest.mark.parametrize("f", [{}, {"w": torch.ones(3)}, {"w": torch.ones(1, 2)}, {"w": torch.ones(())}])
def test_a_fisher_that_does_not_fit_is_refused(f: dict[str, Tensor]) -> None:
    w = one(torch.ones(2))
    for pair in ((f, one(torch.ones(2))), (one(torch.ones(2)), f)):
        with pytest.raises(CofimaError, match="Fisher of 'w' does not fit"):
            fisher_average(w, w, *pair, 0.5)


# --- writing in place -----------------------------------------------------------------------------


def layouts() -> list[tuple[str, Tensor, Tensor]]:
    """Return pairs of tensors in every memory layout that a state dict can hold."""
    a, b = random(4, 3, 6, 6, seed=1), random(4, 3, 6, 6, seed=2)
    last = torch.channels_last
    big = torch.zeros(9, 10)
    big[:, ::2], strided = random(9, 5, seed=3), big[:, ::2]
    return [
        ("contiguous", a.clone(), b.clone()),
        ("channels_last", a.to(memory_format=last), b.to(memory_format=last)),
        ("old channels_last", a.to(memory_format=last), b.clone()),
        ("new channels_last", a.clone(), b.to(memory_format=last)),
        ("transposed", a.transpose(0, 3).clone().transpose(0, 3), b.transpose(0, 3).clone().transpose(0, 3)),
        ("strided", strided.clone(), strided),
        ("half", a.half(), b.half()),
        ("half channels_last", a.half().to(memory_format=last), b.half().to(memory_format=last)),
    ]


@pytest.mark.parametrize("where", ["new", "old", "fresh"])
@pytest.mark.parametrize("fisher", [False, True])
def test_writing_into_place_equals_the_pure_form(where: str, fisher: bool, subtests: pytest.Subtests) -> None:
    for case, lam in product(layouts(), (0.0, 0.3, 1.0)):
        with subtests.test(case=case[0], lam=lam):
            assert_written_into_place(case, where, lam, fisher)


def assert_written_into_place(case: tuple[str, Tensor, Tensor], where: str, lam: float, fisher: bool) -> None:
    def copy(value: Tensor) -> Tensor:
        twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return twin.copy_(value)

    old, new = {"w": copy(case[1])}, {"head": random(3, seed=8), "w": copy(case[2]), "n": torch.tensor(3)}
    assert new["w"].stride() == case[2].stride()
    f = [one(random(*case[1].shape, seed=seed).square()) for seed in (5, 6)]

    def merge(out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        return fisher_average(old, new, *f, lam, out=out) if fisher else average(old, new, lam, out=out)

    kept = {k: copy(v) for k, v in old.items()}, {k: copy(v) for k, v in new.items()}
    pure = merge()
    for before, after in zip(kept, (old, new), strict=True):
        assert all(torch.equal(before[k], after[k]) for k in before)
    out = {"new": new, "old": old, "fresh": {k: torch.zeros_like(v) for k, v in new.items()}}[where]
    places = {k: v.data_ptr() for k, v in out.items()}
    assert merge(out) is out
    assert set(out) == set(pure)
    for key, value in pure.items():
        assert torch.equal(out[key], value), key
    assert all(out[k].data_ptr() == place for k, place in places.items())
    if where != "new":
        assert all(torch.equal(kept[1][k], new[k]) for k in kept[1])
    if where != "old":
        assert all(torch.equal(kept[0][k], old[k]) for k in kept[0])


def test_a_network_becomes_the_average_through_its_state_dict() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    old = {k: v + 1 for k, v in snapshot(net).items()}
    expected = average(old, snapshot(net), 0.25)
    average(old, net.state_dict(), 0.25, out=net.state_dict())
    for key, value in net.state_dict().items():
        assert torch.equal(value, expected[key])


def test_no_gradient_is_recorded() -> None:
    w = one(torch.ones(3, requires_grad=True))
    for merged in (average(w, w, 0.5), fisher_average(w, w, one(torch.ones(3)), one(torch.ones(3)), 0.5)):
        assert not merged["w"].requires_grad
    assert not average_all([w, w])["w"].requires_grad


# --- many models: Eq. 2 and Eq. 6 -----------------------------------------------------------------


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.integers(0, 99))
def test_average_all_equals_numpy(weights: list[float], seed: int) -> None:
    weights[0] += 1e-3
    models = [one(random(4, 3, seed=seed + k)) for k in range(len(weights))]
    expected = np.average([m["w"].double().numpy() for m in models], axis=0, weights=weights)
    np.testing.assert_allclose(average_all(models, weights)["w"].numpy(), expected, rtol=1e-5, atol=1e-6)


@given(st.integers(1, 6), st.integers(0, 99), st.integers(-30, 30))
def test_fisher_average_all_equals_numpy_at_any_scale(count: int, seed: int, power: int) -> None:
    models = [one(random(4, 3, seed=seed + k, dtype=torch.float64)) for k in range(count)]
    f = [
        one(random(4, 3, seed=seed + 50 + k, dtype=torch.float64).square() * 10.0**power)
        for k in range(count)
    ]
    for one_f in f:
        one_f["w"][0] = 0  # one row that no Fisher knows of: the plain mean
    weights = np.stack([x["w"].numpy() for x in f])
    weights[:, 0] = 1
    stack = np.stack([m["w"].numpy() for m in models])
    expected = (weights * stack).sum(0) / weights.sum(0)
    np.testing.assert_allclose(fisher_average_all(models, f)["w"].numpy(), expected, rtol=1e-12, atol=1e-13)


@given(values(-1e3, 1e3), values(-1e3, 1e3), fishers(), fishers())
def test_eq_6_for_two_models_is_eq_7_with_one_half(o: Tensor, n: Tensor, fo: Tensor, fn: Tensor) -> None:
    a = fisher_average_all([one(o), one(n)], [one(fo), one(fn)])["w"]
    b = fisher_average(one(o), one(n), one(fo), one(fn), 0.5)["w"]
    scale = torch.maximum(o.abs(), n.abs())
    assert bool(((a - b).abs() <= 2e-6 * scale).all())


@given(values(-1e3, 1e3), values(-1e3, 1e3), inner)
def test_eq_2_for_two_models_is_eq_3(o: Tensor, n: Tensor, lam: float) -> None:
    a, b = average_all([one(o), one(n)], [1 - lam, lam])["w"], average(one(o), one(n), lam)["w"]
    scale = torch.maximum(o.abs(), n.abs())
    assert bool(((a - b).abs() <= 1e-6 * scale).all())


def test_many_models_half_precision_integers_and_untouched_inputs() -> None:
    models = [{"w": torch.full((3,), v).half(), "n": torch.tensor(k)} for k, v in enumerate([1.0, 2.0, 4.0])]
    before = [{k: v.clone() for k, v in m.items()} for m in models]
    merged = average_all(models)
    assert merged["w"].dtype == torch.float16
    assert torch.equal(merged["w"], torch.full((3,), 7 / 3).half())
    assert int(merged["n"]) == 2
    merged["n"] += 5
    merged["w"] += 5
    for m, b in zip(models, before, strict=True):
        assert all(torch.equal(m[k], b[k]) for k in m)


def test_a_key_that_some_models_have_is_averaged_over_these() -> None:
    models = [
        {"body": torch.tensor([1.0]), "head.a": torch.tensor([5.0])},
        {"body": torch.tensor([2.0]), "head.b": torch.tensor([6.0])},
        {"body": torch.tensor([6.0]), "head.b": torch.tensor([8.0])},
    ]
    merged = average_all(models)
    assert {k: float(v) for k, v in merged.items()} == {"body": 3.0, "head.a": 5.0, "head.b": 7.0}
    f = [{k: torch.full_like(v, 1.0 + k_) for k, v in m.items()} for k_, m in enumerate(models)]
    weighted = fisher_average_all(models, f)
    assert float(weighted["head.a"]) == 5.0
    assert float(weighted["head.b"]) == pytest.approx((2 * 6 + 3 * 8) / 5)
    assert float(weighted["body"]) == pytest.approx((1 + 2 * 2 + 3 * 6) / 6)


def test_a_fisher_that_one_of_many_lacks_is_refused() -> None:
    models = [
        {"a": torch.ones(2)},
        {"a": torch.ones(2), "h": torch.ones(2)},
        {"a": torch.ones(2), "h": torch.ones(2)},
    ]
    f = [{k: torch.ones_like(v) for k, v in m.items()} for m in models]
    del f[2]["h"]
    with pytest.raises(CofimaError, match="'h'"):
        fisher_average_all(models, f)
    with pytest.raises(CofimaError, match="'w'"):
        fisher_average_all([one(torch.ones(2))], [one(torch.ones(3))])


@pytest.mark.parametrize(
    "weights", [[1.0], [-1.0, 2.0], [0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]]
)
def test_impossible_weights_of_models_are_refused(weights: list[float]) -> None:
    with pytest.raises(CofimaError):
        average_all([one(torch.ones(2)), one(torch.ones(2))], weights)


def test_no_models_and_unequal_numbers_are_refused() -> None:
    with pytest.raises(CofimaError):
        average_all([])
    with pytest.raises(CofimaError):
        fisher_average_all([], [])
    with pytest.raises(CofimaError):
        fisher_average_all([one(torch.ones(2))], [])


# --- distances and lam = auto ---------------------------------------------------------------------


@given(values(-1e3, 1e3, size=30), values(-1e3, 1e3, size=30))
def test_distance_is_the_norm_over_what_both_have(a: Tensor, b: Tensor) -> None:
    left = {"x": a[:10], "y": a[10:].reshape(4, 5), "n": torch.tensor(3), "only": torch.ones(9)}
    right = {"x": b[:10], "y": b[10:].reshape(4, 5), "n": torch.tensor(8), "other": torch.ones(9)}
    expected = float(torch.linalg.vector_norm(a.double() - b.double()))
    assert weight_distance(left, right) == pytest.approx(expected, rel=1e-9)
    assert weight_distance(right, left) == pytest.approx(expected, rel=1e-9)
    assert weight_distance(left, left) == 0


@given(st.integers(0, 200), shares)
def test_the_average_moves_by_its_share_of_the_distance(seed: int, lam: float) -> None:
    old, new = (one(random(40, seed=seed + k, dtype=torch.float64)) for k in (0, 500))
    moved = weight_distance(average(old, new, lam), old)
    assert moved == pytest.approx(lam * weight_distance(new, old), rel=1e-9, abs=1e-12)
    f = [one(random(40, seed=seed + k, dtype=torch.float64).square()) for k in (1, 2)]
    assert weight_distance(fisher_average(old, new, *f, lam), old) <= weight_distance(new, old) * (1 + 1e-12)


@given(st.integers(0, 300))
def test_auto_lambda_is_the_minimum_of_the_two_quadratics(seed: int) -> None:
    old, new, fo, fn = (random(12, seed=4 * seed + k, dtype=torch.float64) for k in range(4))
    fo, fn = fo.square() * 10.0 ** (seed % 5 - 2), fn.square()
    lam = auto_lambda(one(old), one(new), one(fo), one(fn))
    grid = torch.linspace(0, 1, 20001, dtype=torch.float64)[:, None]
    at = old + grid * (new - old)
    loss = (fo * (at - old) ** 2).sum(1) + (fn * (at - new) ** 2).sum(1)
    assert lam == pytest.approx(float(grid[loss.argmin()]), abs=6e-5)
    scaled = auto_lambda(one(old), one(new), one(fo * 1e-30), one(fn * 1e-30))
    assert scaled == pytest.approx(lam, rel=1e-9)


@pytest.mark.parametrize("tasks", [2, 3, 7])
def test_auto_lambda_of_equal_tasks_is_one_over_t(tasks: int) -> None:
    f, old, new = random(30, seed=1).square(), one(random(30, seed=2)), one(random(30, seed=3))
    assert auto_lambda(old, new, one(f * (tasks - 1)), one(f)) == pytest.approx(1 / tasks, rel=1e-6)


def test_auto_lambda_falls_back_aloud_where_it_is_undefined() -> None:
    w, other, f, zero = one(torch.ones(3)), one(torch.zeros(3)), one(torch.ones(3)), one(torch.zeros(3))
    for old, new, fo, fn in ((w, w, f, f), (w, other, zero, zero), (w, other, {}, {})):
        with pytest.warns(CofimaWarning, match="lam=auto is undefined"):
            assert auto_lambda(old, new, fo, fn, fallback=0.35) == 0.35
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert auto_lambda(w, other, zero, f) == 1.0
        assert auto_lambda(w, other, f, zero) == 0.0
    with pytest.warns(CofimaWarning, match=r"0\.4"):
        assert auto_lambda(w, w, f, f) == 0.4


def test_auto_lambda_refuses_what_cannot_be_a_curvature() -> None:
    w, other, f = one(torch.ones(3)), one(torch.zeros(3)), one(torch.ones(3))
    for bad in (-0.5, float("nan")):
        with pytest.raises(CofimaError, match="Fisher of 'w'"):
            auto_lambda(w, other, one(torch.full((3,), bad)), f)


def test_the_same_functions_stand_at_top_level() -> None:
    assert cofima.average is average
    assert cofima.fisher_average is fisher_average
    assert cofima.auto_lambda is auto_lambda


def test_weights_count_beside_fisher_and_alone_where_it_is_zero() -> None:
    models = [
        {"x": torch.tensor([1.0, 1.0]), "buffer": torch.tensor([4.0])},
        {"x": torch.tensor([3.0, 3.0]), "buffer": torch.tensor([8.0])},
    ]
    fishers = [{"x": torch.tensor([1.0, 0.0])}, {"x": torch.tensor([3.0, 0.0])}]
    found = fisher_average_all(models, fishers, [3, 1])
    torch.testing.assert_close(found["x"], torch.tensor([(3 * 1 + 3 * 3) / 6, 1.5]))
    torch.testing.assert_close(found["buffer"], torch.tensor([5.0]))
    same = fisher_average_all(models, fishers, [1, 1])
    torch.testing.assert_close(same, fisher_average_all(models, fishers))
    with pytest.raises(CofimaError, match="one weight a model: 1 for 2"):
        fisher_average_all(models, fishers, [1])
    with pytest.raises(CofimaError, match="not negative"):
        fisher_average_all(models, fishers, [1, float("nan")])
