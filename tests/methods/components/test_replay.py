"""The memory: what is chosen against slow definitions, what is kept against its size."""

import pytest
import torch

from cofima.core.errors import CofimaError
from cofima.data.image_set import ImageSet, concatenate
from cofima.methods.components.replay import (
    Concatenated,
    Reservoir,
    best_of_each,
    check_memory_size,
    first_of_each,
    greedy_balanced,
    held_out,
    herding,
    hold_out,
    with_exemplars,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(labels: list[int], first: int = 0) -> ImageSet:
    """Return images whose every pixel is their number."""
    pixels = torch.arange(first, first + len(labels), dtype=torch.uint8)[:, None, None, None].repeat(
        1, 3, 2, 2
    )
    return ImageSet(pixels, torch.arange(len(labels)), torch.tensor(labels))


def numbers(images) -> list[int]:
    return images.batch(torch.arange(len(images)))[0][:, 0, 0, 0].tolist()


# --- reservoir ----------------------------------------------------------------------------------------


def passed(size: int, total: int, batch: int, seed: int) -> Reservoir:
    made, rng = Reservoir(size), generator(seed)
    images = numbered([0] * total)
    for at in torch.arange(total).split(batch):
        pixels, labels = images.batch(at)
        made.add(pixels, labels, torch.zeros(len(at), 2), rng)
        assert len(made) == min(size, made.seen) == len(made.state()["memory.pixels"])
    return made


def test_a_reservoir_is_uniform_over_all_that_passed() -> None:
    size, total, runs = 10, 60, 300
    counts = torch.zeros(total)
    for seed in range(runs):
        kept = passed(size, total, 7, seed).pixels[:, 0, 0, 0].long()
        assert len(set(kept.tolist())) == size
        counts[kept] += 1
    expected = runs * size / total
    spread = (expected * (1 - size / total)) ** 0.5
    assert ((counts - expected).abs() / spread).max() < 4.5
    chi = float(((counts - expected).square() / spread**2).sum())
    assert 25 < chi < 110  # 59 degrees of freedom


def test_a_reservoir_is_the_textbook_loop() -> None:
    made = passed(5, 40, 1, seed=3)
    rng, kept = generator(3), []
    for n in range(40):
        place = int(torch.rand(1, generator=rng, dtype=torch.float64) * (n + 1))
        if n < 5:
            kept.append(n)
        elif place < 5:
            kept[place] = n
    assert made.pixels[:, 0, 0, 0].tolist() == kept


def test_a_reservoir_keeps_everything_together_and_is_restored_with_its_bits(same_bits) -> None:
    made, rng = Reservoir(6), generator(1)
    for task, classes in enumerate((2, 3)):
        images = numbered([classes - 1] * 20, first=20 * task)
        pixels, labels = images.batch(torch.arange(20))
        made.add(pixels, labels, pixels[:, 0, 0, :1].float().repeat(1, classes), rng)
    for pixel, label, logits, known in zip(
        made.pixels[:, 0, 0, 0].tolist(), made.labels.tolist(), made.logits, made.known.tolist(), strict=True
    ):
        assert known == (3 if pixel >= 20 else 2)
        assert label == known - 1
        assert logits.tolist() == [pixel] * known + [0] * (3 - known)
    assert {2, 3} == set(made.known.tolist())
    again = Reservoir.restore(6, made.state())
    same_bits(again.state(), made.state())
    for one, other in zip(made.draw(4, generator(2)), again.draw(4, generator(2)), strict=True):
        assert torch.equal(one, other)
    assert len(set(made.draw(99, generator(0))[0][:, 0, 0, 0].tolist())) == 6  # all, none twice


# --- herding ------------------------------------------------------------------------------------------


def test_herding_is_the_slow_greedy_definition() -> None:
    features = torch.randn(30, 8, generator=generator())
    units = features.double() / features.double().norm(dim=1, keepdim=True)
    chosen: list[int] = []
    for _ in range(12):
        left = [i for i in range(30) if i not in chosen]
        chosen.append(min(left, key=lambda i: float((units[[*chosen, i]].mean(0) - units.mean(0)).norm())))
    assert herding(features, 12).tolist() == chosen
    assert herding(features, 5).tolist() == chosen[:5]
    assert sorted(herding(features, 99).tolist()) == list(range(30))


def test_exemplars_are_chosen_class_by_class() -> None:
    labels = torch.tensor([1, 0, 1, 1, 0, 0, 1])
    features = torch.randn(7, 4, generator=generator())
    chosen = best_of_each(labels, 2, features, generator())
    assert labels[chosen].tolist() == [0, 0, 1, 1]
    zeros = torch.tensor([1, 4, 5])
    assert chosen[:2].tolist() == zeros[herding(features[zeros], 2)].tolist()
    drawn = best_of_each(labels, 3, None, generator())
    assert labels[drawn].tolist() == [0, 0, 0, 1, 1, 1]
    assert len(set(drawn.tolist())) == 6
    assert first_of_each(labels, 2).tolist() == [1, 4, 0, 2]
    memory = with_exemplars(numbered([0, 0, 0]), numbered([1, 1], first=9), 2, None, generator())
    assert memory.labels.tolist() == [0, 0, 1, 1]
    assert numbers(memory)[:2] == [0, 1]
    assert memory.pixels.data_ptr() != 0
    assert len(memory.pixels) == 4  # its own, and no more


# --- greedy balanced ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [7, 12, 30])
@pytest.mark.parametrize("order", ["by task", "mixed"])
def test_a_greedy_memory_is_balanced_and_never_too_large(size: int, order: str) -> None:
    labels = torch.arange(5).repeat_interleave(40)
    if order == "mixed":
        labels = labels[torch.randperm(200, generator=generator(5))]
    for end in range(1, 201):  # what it is after each image
        kept = greedy_balanced(labels[:end], 0, size, generator(1))
        counts = torch.bincount(labels[kept])
        assert len(kept) <= size
        assert len(set(kept.tolist())) == len(kept)
    present = counts[counts > 0]
    assert len(present) == 5
    assert present.max() - present.min() <= 1
    assert present.min() == size // 5


def test_a_greedy_memory_goes_on_from_what_it_held() -> None:
    labels = torch.arange(4).repeat_interleave(10)
    first = greedy_balanced(labels[:20], 0, 8, generator())
    held = torch.cat([labels[first], labels[20:]])
    second = greedy_balanced(held, len(first), 8, generator())
    assert torch.bincount(held[second]).tolist() == [2, 2, 2, 2]
    few = greedy_balanced(torch.tensor([0] * 10 + [1] * 2), 0, 8, generator())
    assert torch.bincount(torch.tensor([0] * 10 + [1] * 2)[few]).tolist() == [6, 2]  # all that there is


# --- parts held out, and two sets as one ----------------------------------------------------------------


def test_what_is_held_out_is_balanced_and_leaves_each_class_an_image() -> None:
    labels = torch.tensor([0] * 20 + [1] * 6 + [2] * 20 + [3])
    out = held_out(labels, 3, generator())
    assert torch.bincount(labels[out], minlength=4).tolist() == [3, 3, 3, 0]
    assert torch.bincount(labels[~out]).tolist() == [17, 3, 17, 1]
    small = held_out(torch.tensor([0, 0, 1, 1, 1]), 9, generator())
    assert small.sum() == 2
    memory, images = numbered([0] * 20 + [1] * 20), numbered([2] * 30, first=40)
    left, spared = hold_out(memory, images, 0.1, generator())
    assert set(numbers(left)).isdisjoint(numbers(spared))
    assert sorted(numbers(left) + numbers(spared)) == list(range(70))
    taken = spared.batch(torch.arange(len(spared)))[1]
    assert torch.bincount(taken).tolist() == [2, 2, 2]


def test_two_sets_are_read_as_one() -> None:
    both = Concatenated(numbered([0, 1, 2]), numbered([3, 4], first=100))
    pixels, labels = both.batch(torch.tensor([4, 0, 3, 2, 4]))
    assert len(both) == 5
    assert pixels[:, 0, 0, 0].tolist() == [101, 0, 100, 2, 101]
    assert labels.tolist() == [4, 0, 3, 2, 4]
    assert pixels.dtype == torch.uint8


def test_owned_pixels_are_copies_of_the_chosen_ones_alone() -> None:
    images = numbered([0, 1, 2, 3])
    mine = concatenate(images.select(torch.tensor([2, 1])))
    images.pixels.zero_()
    assert numbers(mine) == [2, 1]
    assert mine.pixels.shape[0] == 2


def test_a_memory_that_is_too_small_is_refused() -> None:
    check_memory_size(6, 3, each=2)
    with pytest.raises(CofimaError, match=r"options\.memory_size = 5: too small for 3 classes.*at least 6"):
        check_memory_size(5, 3, each=2)
