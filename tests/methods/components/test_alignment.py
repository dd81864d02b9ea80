"""Classifier alignment equals the slow per-class procedure, and leaves the raw head alone."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima.core.errors import CofimaError
from cofima.methods.components import alignment
from cofima.methods.components.alignment import (
    AlignOptions,
    align,
    loss_gradient,
    membership,
    task_norms,
    task_of_class,
)
from cofima.methods.components.gaussians import ClassGaussians, Sampler, mean_scale
from cofima.models.head import Head

WIDTH = 5
SCALE = mean_scale(torch.tensor([0, 0, 0, 1, 2, 2]))


@pytest.fixture
def head() -> Head:
    made = Head(WIDTH)
    for index, size in enumerate((3, 1, 2)):
        made.grow(size, torch.Generator().manual_seed(index))
    made.blocks[:2].requires_grad_(False)
    return made


@pytest.fixture
def gaussians() -> ClassGaussians:
    g = torch.Generator().manual_seed(3)
    kept = ClassGaussians()
    for _ in range(6):
        kept.add(torch.randn(30, WIDTH, generator=g) + 2 * torch.randn(WIDTH, generator=g))
    return kept


def test_norms_of_tasks_by_hand() -> None:
    logits = torch.tensor([[3.0, 4.0, 5.0, 0.0, 12.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    member = membership([2, 0, 1, 2], logits)  # a task that lost all its classes counts for nothing
    assert member.tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]
    torch.testing.assert_close(task_norms(logits, member), torch.tensor([[5.0, 5.0, 12.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("sizes", [(3, 1, 2), (6,), (1,) * 6])
@pytest.mark.parametrize("temperature", [0.1, 2.0])
def test_the_gradient_is_that_of_autograd(sizes: tuple[int, ...], temperature: float) -> None:
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(7, 6, generator=g, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(6, (7,), generator=g)
    norm = sum(part.norm(dim=1) + 1e-7 for part in torch.split(logits, sizes, 1)) / len(sizes)
    cross_entropy(logits / (norm[:, None] * temperature), labels).backward()
    found = loss_gradient(logits.detach(), labels, membership(sizes, logits), temperature)
    torch.testing.assert_close(found, logits.grad, rtol=1e-12, atol=1e-12)


def test_the_gradient_is_finite_where_all_logits_of_a_task_are_0() -> None:
    logits = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    found = loss_gradient(logits, torch.tensor([0, 2]), membership([2, 1], logits), 0.1)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(
        found[0, 0] + 0.5 / (0.5 * 0.1), found[0, 1]
    )  # the softmax gives both the same


def test_classes_know_their_task(head: Head) -> None:
    assert task_of_class(head).tolist() == [0, 0, 0, 1, 2, 2]


def test_the_raw_head_stays_and_the_copy_moves(
    head: Head, gaussians: ClassGaussians, tiny, same_bits
) -> None:
    before = copy.deepcopy(head.state_dict())
    flags = [p.requires_grad for p in head.parameters()]
    aligned = align(head, gaussians, SCALE, AlignOptions(epochs=2, samples_per_class=8), tiny.context(), 2)
    same_bits(head.state_dict(), before)
    assert [p.requires_grad for p in head.parameters()] == flags
    for own, raw in zip(aligned.blocks, head.blocks, strict=True):  # old rows are trained too
        assert not torch.equal(own.weight, raw.weight)
        assert not torch.equal(own.bias, raw.bias)
    assert all(p.grad is None for p in head.parameters())


def test_no_epochs_give_an_independent_equal_copy(
    head: Head, gaussians: ClassGaussians, tiny, same_bits
) -> None:
    aligned = align(head, gaussians, SCALE, AlignOptions(epochs=0), tiny.context(), 2)
    same_bits(aligned.state_dict(), head.state_dict())
    assert aligned is not head
    assert aligned.blocks[0].weight.data_ptr() != head.blocks[0].weight.data_ptr()


def test_the_same_seed_aligns_the_same_and_another_differs(
    head: Head, gaussians: ClassGaussians, tiny
) -> None:
    how = AlignOptions(epochs=2, samples_per_class=8)
    a, b = (align(head, gaussians, SCALE, how, tiny.context(seed=1), 2).flat()["weight"] for _ in range(2))
    torch.manual_seed(99)
    assert torch.equal(a, b)
    assert not torch.equal(a, align(head, gaussians, SCALE, how, tiny.context(seed=2), 2).flat()["weight"])
    assert not torch.equal(a, align(head, gaussians, SCALE, how, tiny.context(seed=1), 1).flat()["weight"])


def test_alignment_is_the_slow_procedure(head: Head, gaussians: ClassGaussians, tiny) -> None:
    """Blocks of their own, autograd through each, rates set by hand: the same head in the end."""
    how, context = AlignOptions(epochs=3, samples_per_class=8, lr=0.05, temperature=0.2), tiny.context()
    aligned = align(head, gaussians, SCALE, how, context, 2)

    slow = copy.deepcopy(head).requires_grad_(True)
    optimizer = torch.optim.SGD(slow.parameters(), lr=how.lr, momentum=0.9, weight_decay=5e-4)
    sampler = Sampler(gaussians, context.device, SCALE)
    for epoch in range(3):
        rate = how.lr * (1 + torch.cos(torch.tensor(torch.pi * epoch / 3))) / 2
        optimizer.param_groups[0]["lr"] = float(rate)
        drawn, labels = sampler.draw([8] * 6, context.seeds.generator("gaussians", 2, epoch))
        order = torch.randperm(48, generator=context.seeds.generator("alignment", 2, epoch))
        assert len(torch.split(order, 8)) == 6  # as many steps as classes
        for at in torch.split(order, 8):
            parts = [block(drawn[at]) for block in slow.blocks]
            norm = sum(part.norm(dim=1) + 1e-7 for part in parts) / 3
            loss = cross_entropy(torch.cat(parts, 1) / (norm[:, None] * 0.2), labels[at])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for key, value in slow.flat().items():
        torch.testing.assert_close(aligned.flat()[key], value, rtol=1e-4, atol=1e-5)


def draw_slowly(gaussians: ClassGaussians, scale: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw class by class from torch's own distribution, with its own chance."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drawn = [
            torch.distributions.MultivariateNormal(
                scale[c] * gaussians.means[c], covariance_matrix=gaussians.covariance(c)
            ).sample((count,))
            for c in range(len(gaussians))
        ]
    return torch.cat(drawn), torch.arange(len(gaussians)).repeat_interleave(count)


def test_an_aligned_head_is_right_about_independently_drawn_features(
    head: Head, gaussians: ClassGaussians, tiny
) -> None:
    scale = 0.9 + 0.1 * torch.tensor([1, 1, 1, 2, 3, 3]) / 3
    features, labels = draw_slowly(gaussians, scale, 400, seed=1)
    aligned = align(
        head, gaussians, SCALE, AlignOptions(epochs=20, samples_per_class=64, lr=0.001), tiny.context(), 2
    )
    before = float((head(features).argmax(1) == labels).float().mean())
    after = float((aligned(features).argmax(1) == labels).float().mean())
    ideal = torch.stack(
        [
            torch.distributions.MultivariateNormal(
                scale[c] * gaussians.means[c], covariance_matrix=gaussians.covariance(c)
            ).log_prob(features)
            for c in range(6)
        ]
    ).argmax(0)
    assert after > before + 0.3
    assert after > float((ideal == labels).float().mean()) - 0.1


def test_a_diverged_alignment_is_refused(head: Head, gaussians: ClassGaussians, tiny) -> None:
    """A NaN head would predict class 0 for ever, and be written to disk as the model."""
    with pytest.raises(CofimaError, match=r"alignment.*task 3"):
        align(
            head,
            gaussians,
            SCALE,
            AlignOptions(epochs=3, samples_per_class=8, lr=1e30, weight_decay=1e9),
            tiny.context(),
            2,
        )


def test_a_large_epoch_is_drawn_in_rounds(gaussians: ClassGaussians, tiny, monkeypatch) -> None:
    """Each class is drawn as often, in batches of the same size."""
    sampler, seeds = Sampler(gaussians, torch.device("cpu")), tiny.context().seeds
    monkeypatch.setattr(alignment, "AT_ONCE", 3 * 6 * sampler.means.shape[1])
    found = list(alignment._batches(sampler, 6, 8, seeds, 1, 0))
    labels = torch.cat([labels for _, labels in found])
    assert labels.bincount().tolist() == [8] * 6
    rounds = torch.split(labels, [18, 18, 12])
    assert [part.bincount().tolist() for part in rounds] == [[3] * 6, [3] * 6, [2] * 6]
    assert len({tuple(row.tolist()) for part, _ in found for row in part}) == 48  # all drawn afresh
