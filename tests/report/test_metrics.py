"""Metrics: published values, slow definitions, and the laws they obey."""

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cofima.report import metrics

# CIFAR-100, ten tasks of ten classes (1,000 test images each), CoFiMA, seed 1993: the accuracies in the
# released log of Marouf et al., ECCV 2024 (repository IemProg/CoFiMA, logs/cofima_cifar_20e/
# reproduce_1993_cofima_cifar_vit-b-p16_cifar100_224_10_10.log).
PUBLISHED = [
    [98.9],
    [97.3, 98.1],
    [96.7, 96.7, 98.1],
    [95.3, 96.1, 97.3, 97.5],
    [95.4, 95.0, 96.7, 95.5, 96.1],
    [93.1, 94.3, 95.9, 94.2, 95.0, 94.7],
    [91.2, 94.0, 95.4, 94.9, 94.4, 93.0, 96.4],
    [90.9, 93.3, 95.7, 94.5, 92.2, 90.4, 94.1, 92.0],
    [89.5, 91.9, 95.2, 94.3, 90.4, 91.1, 93.6, 92.0, 93.3],
    [88.8, 91.5, 94.7, 93.3, 89.9, 90.6, 92.8, 91.1, 93.2, 93.9],
]
CURVE = [98.9, 97.7, 97.17, 96.55, 95.74, 94.53, 94.19, 92.89, 92.37, 91.98]  # as printed, two decimals


@st.composite
def streams(draw, low=1):
    """Draw a matrix with ``low`` or more tasks and its test-set sizes."""
    tasks = draw(st.integers(low, 7))
    percent = st.floats(0, 100)
    matrix = [draw(st.lists(percent, min_size=t, max_size=t)) for t in range(1, tasks + 1)]
    return matrix, draw(st.lists(st.integers(1, 500), min_size=tasks, max_size=tasks))


def test_published_matrix():
    sizes = [1000] * 10
    assert metrics.accuracies_over_time(PUBLISHED, sizes) == pytest.approx(CURVE, abs=0.005)
    assert metrics.last(PUBLISHED, sizes) == pytest.approx(91.98, abs=1e-9)
    assert metrics.incremental(PUBLISHED, sizes) == pytest.approx(95.202, abs=0.005)
    assert metrics.forgetting(PUBLISHED) == pytest.approx(4.3556, abs=5e-5)
    assert metrics.backward_transfer(PUBLISHED) == pytest.approx(-4.3556, abs=5e-5)


def test_nothing_is_rounded_before_averaging():
    """The log rounds each accuracy to two decimals before it averages them: 95.202 instead of 95.20099."""
    assert statistics.fmean(CURVE) == pytest.approx(95.202, abs=1e-9)
    exact = statistics.fmean(statistics.fmean(row) for row in PUBLISHED)
    assert metrics.incremental(PUBLISHED, [1000] * 10) == pytest.approx(exact, abs=1e-12)
    assert abs(exact - 95.202) > 1e-3


@settings(deadline=None)
@given(streams())
def test_accuracy_counts_images(stream):
    """The oracle lists every test image as right or wrong by its task's accuracy."""
    matrix, sizes = stream
    for t, got in enumerate(metrics.accuracies_over_time(matrix, sizes)):
        images = [matrix[t][j] for j in range(t + 1) for _ in range(sizes[j])]
        assert got == pytest.approx(sum(images) / len(images))


@settings(deadline=None)
@given(streams(low=2))
def test_forgetting_and_transfer_by_definition(stream):
    matrix, _ = stream
    tasks = len(matrix)
    lost = gained = 0.0
    for j in range(1, tasks):  # one-based, as in the papers
        best = float("-inf")
        for step in range(j, tasks):
            best = max(best, matrix[step - 1][j - 1])
        lost += best - matrix[tasks - 1][j - 1]
        gained += matrix[tasks - 1][j - 1] - matrix[j - 1][j - 1]
    assert metrics.forgetting(matrix) == pytest.approx(lost / (tasks - 1), abs=1e-9)
    assert metrics.backward_transfer(matrix) == pytest.approx(gained / (tasks - 1), abs=1e-9)


@settings(deadline=None)
@given(streams())
def test_bounds(stream):
    matrix, sizes = stream
    near = 1e-9
    for row, value in zip(matrix, metrics.accuracies_over_time(matrix, sizes), strict=True):
        assert min(row) - near <= value <= max(row) + near
    over_time = metrics.accuracies_over_time(matrix, sizes)
    assert min(over_time) - near <= metrics.incremental(matrix, sizes) <= max(over_time) + near
    if len(matrix) > 1:
        assert -100 <= metrics.forgetting(matrix) <= 100
        assert metrics.forgetting(matrix) >= -metrics.backward_transfer(matrix) - near


@settings(deadline=None)
@given(streams(), st.integers(1, 400))
def test_equal_sizes_are_a_plain_mean(stream, size):
    matrix, _ = stream
    sizes = [size] * len(matrix)
    assert metrics.last(matrix, sizes) == pytest.approx(metrics.task_average(matrix))
    assert metrics.accuracies_over_time(matrix, sizes) == pytest.approx([statistics.fmean(r) for r in matrix])


@settings(deadline=None)
@given(streams(), st.integers(2, 9))
def test_scaling_all_test_sets_changes_nothing(stream, times):
    matrix, sizes = stream
    assert metrics.incremental(matrix, [n * times for n in sizes]) == pytest.approx(
        metrics.incremental(matrix, sizes)
    )


@settings(deadline=None)
@given(streams(low=2), st.randoms(use_true_random=False))
def test_last_ignores_the_order_of_tasks(stream, shuffler):
    """Last-Acc and the task average see the final row only, as a set of (accuracy, size) pairs."""
    matrix, sizes = stream
    order = list(range(len(sizes)))
    shuffler.shuffle(order)
    moved = [*matrix[:-1], [matrix[-1][j] for j in order]]
    assert metrics.last(moved, [sizes[j] for j in order]) == pytest.approx(metrics.last(matrix, sizes))
    assert metrics.task_average(moved) == pytest.approx(metrics.task_average(matrix))


@settings(deadline=None)
@given(streams(low=3), st.randoms(use_true_random=False))
def test_forgetting_ignores_the_order_of_middle_rows(stream, shuffler):
    """Shuffling one task's accuracies before the last task keeps their best, so the forgetting."""
    matrix, _ = stream
    middle = [row[0] for row in matrix[:-1]]
    shuffler.shuffle(middle)
    moved = [[a, *row[1:]] for a, row in zip(middle, matrix, strict=False)] + [matrix[-1]]
    assert metrics.forgetting(moved) == pytest.approx(metrics.forgetting(matrix), abs=1e-9)


def test_forgetting_can_be_negative_and_leaves_the_last_row_out():
    assert metrics.forgetting([[50.0], [80.0, 90.0]]) == -30.0
    assert metrics.forgetting([[50.0], [70.0, 0.0], [60.0, 0.0, 0.0]]) == 5.0


@settings(deadline=None)
@given(streams(low=2))
def test_old_and_new_recombine_to_the_whole(stream):
    matrix, sizes = stream
    parts = metrics.old_new(matrix, sizes)
    assert parts[0] == (None, matrix[0][0])
    for t in range(1, len(matrix)):
        old, new = parts[t]
        seen = sum(sizes[:t])
        whole = (old * seen + new * sizes[t]) / (seen + sizes[t])
        assert whole == pytest.approx(metrics.accuracies_over_time(matrix, sizes)[t])


def test_a_single_task_has_nothing_to_forget():
    assert metrics.forgetting([[90.0]]) is None
    assert metrics.backward_transfer([[90.0]]) is None
    assert metrics.last([[90.0]], [7]) == metrics.incremental([[90.0]], [7]) == 90.0


def test_forward_transfer_needs_scores_of_unseen_classes():
    assert metrics.forward_transfer() is None
    assert metrics.forward_transfer(before=[40.0, 60.0]) is None
    assert metrics.forward_transfer([40.0, 60.0], [10.0, 10.0]) == 40.0
    assert metrics.forward_transfer([], []) is None
    with pytest.raises(ValueError, match="2 accuracies before learning, but 1"):
        metrics.forward_transfer([1.0, 2.0], [1.0])


def test_intransigence_is_the_gap_to_joint_on_the_diagonal():
    matrix = [[90.0], [10.0, 80.0]]
    assert metrics.intransigence(95, matrix) == [5.0, 15.0]
    assert metrics.intransigence([95.0, 70.0], matrix) == [5.0, -10.0]
    with pytest.raises(ValueError, match="expected 2 joint accuracies, got 3"):
        metrics.intransigence([1.0, 2.0, 3.0], matrix)


def test_summary_divides_by_n_minus_one():
    values = [random.Random(7).gauss(80, 3) for _ in range(5)]
    mean = sum(values) / 5
    summary = metrics.summarize(values)
    assert summary.mean == pytest.approx(mean)
    assert summary.std == pytest.approx((sum((v - mean) ** 2 for v in values) / 4) ** 0.5)
    assert metrics.summarize([91.98]) == metrics.Summary(91.98, None, 1)


@pytest.mark.parametrize(
    ("matrix", "sizes", "message"),
    [
        ([], [], "no task has been learned"),
        ([[1.0], [1.0]], [1, 1], "row 2 .* has 1 values; expected 2"),
        ([[1.0]], [1, 1], "each of 1 tasks, got 2"),
    ],
)
def test_wrong_shapes_are_refused(matrix, sizes, message):
    with pytest.raises(ValueError, match=message):
        metrics.last(matrix, sizes)
