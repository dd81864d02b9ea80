"""Streams: published class orders, tasks of any size, labels renumbered one to one, no pixel copied."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cofima.core.errors import CofimaError
from cofima.data.image_set import ImageSet
from cofima.data.sources.in_memory import blobs
from cofima.data.splits import share_of, shuffled
from cofima.data.stream import Dataset, Stream, Task, class_order, from_groups, increments, split

PUBLISHED = {
    (1993, 100): [68, 56, 78, 8, 23, 84, 90, 65, 74, 76, 40, 89],
    (1993, 200): [168, 136, 51, 9, 183, 101, 171, 99, 42, 159, 191, 70],
    (1993, 196): [59, 134, 162, 9, 42, 72, 118, 99, 109, 79, 43, 100],
    (1996, 100): [35, 18, 40, 85, 63, 62],
    (1996, 200): [92, 182, 15, 79, 26, 173],
    (1996, 196): [173, 6, 195, 94, 134, 15],
    (1997, 100): [88, 77, 36, 54, 92, 4],
    (1997, 200): [76, 153, 53, 4, 197, 152],
    (1997, 196): [86, 150, 52, 4, 186, 54],
}


def tiny(classes: int, seed: int = 0) -> Dataset:
    """One-pixel images whose color is their own number, so that each can be recognized anywhere."""
    count = 5 * classes
    pixels = torch.arange(count).remainder(256).to(torch.uint8).view(-1, 1, 1, 1).repeat(1, 3, 1, 1)
    labels = (
        torch.arange(count)[torch.randperm(count, generator=torch.Generator().manual_seed(seed))] % classes
    )
    everything = ImageSet(pixels, torch.arange(count), labels)
    tested = torch.zeros(count, dtype=torch.bool)
    for label in range(classes):
        tested[(labels == label).nonzero()[0]] = True
    names = tuple(f"c{label}" for label in range(classes))
    return Dataset("tiny", names, everything.select(~tested), everything.select(tested), True, 0.5, {"a": 1})


def rows(stream: Stream, which: str) -> list[int]:
    return [row for task in stream for row in getattr(task, which).rows.tolist()]


def original_labels(dataset: Dataset, which: str) -> dict[int, int]:
    images = getattr(dataset, which)
    return dict(zip(images.rows.tolist(), images.labels.tolist(), strict=True))


@pytest.mark.parametrize(("seed", "n"), PUBLISHED)
def test_class_orders_are_the_published_ones(seed: int, n: int) -> None:
    order = class_order(n, seed)
    assert order[: len(PUBLISHED[seed, n])] == PUBLISHED[seed, n]
    assert sorted(order) == list(range(n))


def test_class_order_leaves_the_global_generator_alone() -> None:
    np.random.seed(7)
    expected = np.random.rand()
    np.random.seed(7)
    class_order(100, 1993)
    assert np.random.rand() == expected


def test_no_seed_leaves_the_classes_as_they_are() -> None:
    assert class_order(5, None) == [0, 1, 2, 3, 4]
    assert split(tiny(5), 2, 2, None).class_names == ("c0", "c1", "c2", "c3", "c4")


@pytest.mark.parametrize(
    ("n", "first", "increment", "sizes"),
    [
        (196, 20, 20, [20] * 9 + [16]),
        (196, 16, 20, [16] + [20] * 9),
        (100, 10, 10, [10] * 10),
        (100, 50, 10, [50] + [10] * 5),
        (10, 10, 3, [10]),
        (3, 1, 1, [1, 1, 1]),
        (8, 3, 3, [3, 3, 2]),
        (4, 3, 9, [3, 1]),
    ],
)
def test_increments(n: int, first: int, increment: int, sizes: list[int]) -> None:
    assert increments(n, first, increment) == sizes


@given(st.integers(1, 300), st.data())
def test_increments_deal_out_every_class(n: int, data: st.DataObject) -> None:
    first, increment = data.draw(st.integers(1, n)), data.draw(st.integers(1, n + 5))
    sizes = increments(n, first, increment)
    assert sum(sizes) == n
    assert sizes[0] == first
    assert all(size == increment for size in sizes[1:-1])
    assert all(0 < size <= increment for size in sizes[1:])


def test_more_base_classes_than_there_are_classes_are_refused() -> None:
    with pytest.raises(CofimaError, match="only 10 classes"):
        increments(10, 11, 1)


@given(st.integers(1, 12), st.integers(0, 50), st.data())
def test_labels_are_renumbered_one_to_one(n: int, seed: int, data: st.DataObject) -> None:
    dataset = tiny(n, seed)
    stream = split(dataset, data.draw(st.integers(1, n)), data.draw(st.integers(1, n)), seed)
    order = class_order(n, seed)
    assert [c for task in stream for c in task.classes] == list(range(n))
    for which in ("train", "test"):
        labels = original_labels(dataset, which)
        assert sorted(rows(stream, which)) == sorted(labels)
        for task in stream:
            images: ImageSet = getattr(task, which)
            assert set(images.labels.tolist()) == set(task.classes)
            for row, label in zip(images.rows.tolist(), images.labels.tolist(), strict=True):
                assert order[label] == labels[row]
                assert stream.class_names[label] == dataset.class_names[labels[row]]


def test_index_slice_iterate() -> None:
    stream = split(tiny(9), 3, 2, 1993)
    assert len(stream) == 4
    assert [task.index for task in stream] == [0, 1, 2, 3]
    assert [task.classes for task in stream] == [range(0, 3), range(3, 5), range(5, 7), range(7, 9)]
    assert isinstance(stream[1], Task)
    assert stream[-1] is stream[3]
    assert isinstance(stream[1:3], Stream)
    assert list(stream[1:3]) == [stream[1], stream[2]]
    assert next(reversed(stream)) is stream[3]
    assert stream[2] in stream
    with pytest.raises(IndexError):
        stream[4]
    with pytest.raises(ValueError, match="step"):
        stream[::2]


def test_a_slice_knows_names_by_class_id() -> None:
    stream = split(tiny(9), 3, 2, 1993)
    for part_ in (stream[:2], stream[2:], stream[1:2]):
        for task in part_:
            assert task.names == tuple(part_.class_names[c] for c in task.classes)
    assert len(stream[:2].class_names) == 5
    assert stream[:0].class_names == ()


def test_building_a_stream_copies_no_pixels() -> None:
    dataset = tiny(6)
    storage = dataset.train.pixels.data_ptr()
    stream = split(dataset, 2, 2, 0)
    made = [
        stream,
        stream.merged(),
        stream.held_out(0.5, 0),
        stream.limited("train", 2, 0),
        from_groups(dataset, [[3]]),
    ]
    for images in (images for one in made for task in one for images in (task.train, task.test)):
        assert images.pixels.data_ptr() == storage


def test_unequal_groups_by_index_and_name() -> None:
    dataset = tiny(6)
    stream = from_groups(dataset, [["c4"], [0, "c5", 1], [2]])
    assert stream.class_names == ("c4", "c0", "c5", "c1", "c2")  # c3 is in no group
    assert [task.classes for task in stream] == [range(0, 1), range(1, 4), range(4, 5)]
    labels = original_labels(dataset, "train")
    for task in stream:
        for row, label in zip(task.train.rows.tolist(), task.train.labels.tolist(), strict=True):
            assert f"c{labels[row]}" == stream.class_names[label]
    assert len(rows(stream, "train")) == 5 * 4


def test_one_class_is_a_stream() -> None:
    stream = from_groups(tiny(1), [["c0"]])
    assert (len(stream), stream[0].classes, len(stream[0].train)) == (1, range(0, 1), 4)


def test_group_problems_come_all_at_once() -> None:
    with pytest.raises(CofimaError) as caught:
        from_groups(blobs(4), [["blob 1", "blbo 2"], [], [1, 7, -1], ["blob 3", 3]])
    text = str(caught.value)
    assert "6 problems" in text
    assert "group 1: unknown class 'blbo 2'; did you mean 'blob 2'?" in text
    assert "group 2 is empty" in text
    assert "group 3: class 'blob 1' is already in group 1" in text
    assert "index 7; they run from 0 to 3" in text
    assert "index -1" in text
    assert "group 4: class 'blob 3' is already in group 4" in text
    with pytest.raises(CofimaError, match="no group"):
        from_groups(blobs(4), [])


def test_unknown_class_among_many_does_not_list_them_all() -> None:
    with pytest.raises(CofimaError) as caught:
        from_groups(tiny(50), [["zebra"]])
    assert "c17" not in str(caught.value)


def test_merged_is_all_tasks_in_one() -> None:
    stream = split(tiny(7), 3, 2, 5)
    (task,) = stream.merged()
    assert (task.index, task.classes, task.names) == (0, range(0, 7), stream.class_names)
    for which in ("train", "test"):
        together: ImageSet = getattr(task, which)
        apart = {
            r: y
            for t in stream
            for r, y in zip(getattr(t, which).rows.tolist(), getattr(t, which).labels.tolist(), strict=True)
        }
        assert dict(zip(together.rows.tolist(), together.labels.tolist(), strict=True)) == apart
    assert stream[1:3].merged()[0].classes == range(3, 7)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.99])
def test_held_out_comes_from_training_images_only(share: float) -> None:
    stream = split(tiny(6), 2, 2, 0)
    trial = stream.held_out(share, seed=3)
    for whole, cut in zip(stream, trial, strict=True):
        kept, held = set(cut.train.rows.tolist()), set(cut.test.rows.tolist())
        assert not kept & held
        assert kept | held == set(whole.train.rows.tolist())
        assert not held & set(whole.test.rows.tolist())
        for label in cut.classes:
            assert cut.test.counts()[label] == max(1, min(3, round(4 * share)))
            assert cut.train.counts()[label] + cut.test.counts()[label] == 4


def test_held_out_images_do_not_depend_on_the_class_order() -> None:
    dataset = tiny(6)
    one, other = (split(dataset, 2, 2, seed).held_out(0.5, 3) for seed in (0, 1))
    assert sorted(rows(one, "test")) == sorted(rows(other, "test"))
    assert sorted(rows(one, "test")) != sorted(rows(split(dataset, 2, 2, 0).held_out(0.5, 4), "test"))


def test_a_class_with_one_image_keeps_it() -> None:
    stream = split(tiny(3), 3, 1, None).limited("train", 1, 0).held_out(0.5, 0)
    assert (len(stream[0].train), len(stream[0].test)) == (3, 0)


def test_limited_takes_so_many_of_each_class() -> None:
    stream = split(tiny(4), 2, 2, 0)
    for task, whole in zip(stream.limited("train", 3, 1), stream, strict=True):
        assert set(task.train.counts().values()) == {3}
        assert set(task.train.rows.tolist()) < set(whole.train.rows.tolist())
        assert task.test is whole.test
    assert rows(stream.limited("train", 99, 1), "train") == rows(stream, "train")
    for task, whole in zip(stream.limited("test", 1, 1), stream, strict=True):
        assert set(task.test.counts().values()) == {1}
        assert task.train is whole.train


def test_what_was_done_to_a_stream_is_in_its_facts() -> None:
    stream = split(tiny(4), 2, 2, 0).limited("train", 3, 1).held_out(0.5, 2)
    expected = {
        "a": 1,
        "max_train_per_class": 3,
        "max_train_per_class_seed": 1,
        "val_fraction": 0.5,
        "val_fraction_seed": 2,
    }
    assert json.loads(json.dumps(stream.facts)) == expected
    assert (stream.flip, stream.crop, stream.dataset_name) == (True, 0.5, "tiny")


@given(st.lists(st.text(max_size=5), unique=True, min_size=1, max_size=12), st.integers(), st.randoms())
def test_shuffles_depend_on_the_keys_not_their_order(keys: list[str], seed: int, random) -> None:  # type: ignore[no-untyped-def]
    order = shuffled(keys, seed)
    assert sorted(order) == list(range(len(keys)))
    mixed = random.sample(keys, len(keys))
    dealt = [mixed[i] for i in shuffled(mixed, seed)]
    assert dealt == [keys[i] for i in order]
    assert [key for key in dealt if key != keys[0]] == [keys[1:][i] for i in shuffled(keys[1:], seed)]


@given(st.floats(0.001, 0.999), st.integers(2, 1000))
def test_a_part_leaves_something_on_both_sides(share: float, count: int) -> None:
    assert 1 <= share_of(count, share) <= count - 1
    assert share_of(1, share) == share_of(0, share) == 0
