"""The batch loop equals a bare PyTorch loop, moves only what may move, and stops when it diverges."""

import copy
from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cofima.core.errors import CofimaError
from cofima.core.seeds import Seeds
from cofima.data.image_set import ImageSet
from cofima.models.net import Net
from cofima.training import device
from cofima.training.context import Batch
from cofima.training.evaluate import evaluate
from cofima.training.loop import batches, make_optimizer, plain_batches, sgd
from cofima.training.options import TrainOptions


def local_loss(net: Net, first: int) -> Callable[[Batch], Tensor]:
    return lambda batch: cross_entropy(net(batch.images)[:, first:], batch.labels - first)


def normalized(pixels: Tensor) -> Tensor:
    """Return images in the layout of the view: convolutions add up in another order in another one."""
    return pixels.to(torch.float32, memory_format=torch.channels_last).sub(127.5).div(127.5)


@pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
def test_the_loop_is_a_bare_pytorch_loop(network: str, tiny, same_bits) -> None:
    how = {"epochs": 5, "batch_size": 8, "milestones": (2, 4), "gamma": 0.5, "weight_decay": 0.01}
    context = tiny.context(how)
    task = tiny.stream((2, 3), per_class=7)[1]  # 21 images: batches of 8, 8, 5
    net = tiny.net(network, sizes=(2, 3))
    bare = copy.deepcopy(net)
    sgd(net, task.train, local_loss(net, 2), context, task=1)

    train = context.train
    head = [*bare.head.blocks[1].parameters()]
    groups = [
        {"params": bare.backbone.parameters(), "lr": train.lr * train.backbone_lr_scale},
        {"params": head, "lr": train.lr},
    ]
    optimizer = torch.optim.SGD(groups, momentum=train.momentum, weight_decay=train.weight_decay)
    bare.train()
    for epoch in range(5):
        for group, base in zip(
            optimizer.param_groups, (train.lr * train.backbone_lr_scale, train.lr), strict=True
        ):
            group["lr"] = base * 0.5 ** sum(epoch >= m for m in (2, 4))
        order = torch.randperm(21, generator=context.seeds.generator("loader", 1, epoch))
        for at in (order[:8], order[8:16], order[16:]):
            pixels, labels = task.train.batch(at)
            images = normalized(pixels)
            loss = cross_entropy(bare(images)[:, 2:], labels - 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    same_bits(net.state_dict(), bare.state_dict())


def test_another_optimizer_takes_the_steps_and_a_frozen_backbone_computes_as_at_test_time(
    tiny, same_bits
) -> None:
    context = tiny.context({"epochs": 3, "batch_size": 8})
    task = tiny.stream((2,), per_class=4)[0]
    net = tiny.net("resnet_test", sizes=(2,))  # its batch statistics would move in training
    net.backbone.requires_grad_(False)
    bare = copy.deepcopy(net).eval()
    adam = torch.optim.Adam(net.head.parameters(), lr=0.1)
    sgd(net, task.train, local_loss(net, 0), context, 0, optimizer=adam)
    optimizer = torch.optim.Adam(bare.head.parameters(), lr=0.1)  # at one rate to the end
    for epoch in range(3):
        pixels, labels = task.train.batch(
            torch.randperm(8, generator=context.seeds.generator("loader", 0, epoch))
        )
        optimizer.zero_grad()
        cross_entropy(bare(normalized(pixels)), labels).backward()
        optimizer.step()
    same_bits(net.state_dict(), bare.state_dict())


def spy_rates(monkeypatch: pytest.MonkeyPatch, tiny, **how) -> list[tuple[float, float]]:
    """Return the two learning rates at every step."""
    seen: list[tuple[float, float]] = []
    step = torch.optim.SGD.step

    def spied(self: torch.optim.SGD, *rest: object) -> object:
        seen.append(tuple(group["lr"] for group in self.param_groups))
        return step(self, *rest)

    monkeypatch.setattr(torch.optim.SGD, "step", spied)
    net = tiny.net(sizes=(2,))
    task = tiny.stream((2,), per_class=4)[0]
    sgd(net, task.train, local_loss(net, 0), tiny.context({"batch_size": 8} | how), 0)
    return seen


def test_both_rates_fall_at_the_milestones(monkeypatch: pytest.MonkeyPatch, tiny) -> None:
    seen = spy_rates(
        monkeypatch, tiny, epochs=4, milestones=(1, 3), lr=0.1, backbone_lr_scale=0.01, gamma=0.1
    )
    flat = [rate for pair in seen for rate in pair]
    assert flat == pytest.approx([1e-3, 0.1, 1e-4, 1e-2, 1e-4, 1e-2, 1e-5, 1e-3])


def test_by_default_the_rates_fall_at_nine_tenths(monkeypatch: pytest.MonkeyPatch, tiny) -> None:
    seen = spy_rates(monkeypatch, tiny, epochs=10, lr=0.1)
    assert [pair[1] for pair in seen] == pytest.approx([0.1] * 9 + [0.01])
    assert TrainOptions().decays == [18]  # the paper's milestone for 20 epochs


def test_a_backbone_rate_of_zero_freezes_the_backbone(tiny, same_bits) -> None:
    net = tiny.net(sizes=(2,))
    before = copy.deepcopy(net)
    task = tiny.stream((2,))[0]
    sgd(net, task.train, local_loss(net, 0), tiny.context({"backbone_lr_scale": 0, "weight_decay": 0.1}), 0)
    same_bits(net.backbone.state_dict(), before.backbone.state_dict())
    assert not torch.equal(net.head.blocks[0].weight, before.head.blocks[0].weight)


def test_old_blocks_are_bit_identical_after_training_with_heavy_decay(tiny, same_bits) -> None:
    net = tiny.net(sizes=(2, 3))
    old = copy.deepcopy(net.head.blocks[0])
    task = tiny.stream((2, 3))[1]
    sgd(net, task.train, local_loss(net, 2), tiny.context({"weight_decay": 0.5}), 1)
    same_bits(net.head.blocks[0].state_dict(), old.state_dict())
    assert all(p.grad is None for p in net.parameters())  # let go: they would double the memory of a merge


def test_weight_decay_reaches_everything_that_moves(tiny) -> None:
    optimizer = make_optimizer(tiny.net(sizes=(2, 3)), TrainOptions(weight_decay=0.25))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.25]
    net = tiny.net(sizes=(2, 3))
    moving = {id(p) for group in make_optimizer(net, TrainOptions()).param_groups for p in group["params"]}
    assert moving == {id(p) for p in [*net.backbone.parameters(), *net.head.blocks[1].parameters()]}


def test_decay_alone_shrinks_what_has_no_gradient(tiny) -> None:
    net = tiny.net(sizes=(2,))
    before = net.backbone.norm.weight.detach().clone()
    how = {
        "epochs": 1,
        "batch_size": 64,
        "lr": 0.1,
        "backbone_lr_scale": 1.0,
        "weight_decay": 0.5,
        "momentum": 0.0,
    }
    task = tiny.stream((2,))[0]
    sgd(net, task.train, lambda batch: 0.0 * net(batch.images).sum(), tiny.context(how), 0)
    torch.testing.assert_close(net.backbone.norm.weight.detach(), before * (1 - 0.1 * 0.5))


# --- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "size"), [(1, 8), (8, 8), (9, 8), (17, 8), (15, 8), (5, 4), (3, 2)])
def test_every_image_comes_once_and_none_alone(count: int, size: int) -> None:
    dealt = batches(count, size, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(dealt).tolist()) == list(range(count))
    assert all(len(b) <= size + 1 for b in dealt)
    assert count == 1 or min(len(b) for b in dealt) > 1


def test_a_lone_last_image_trains_with_batchnorm(tiny) -> None:
    net = tiny.net("resnet_test", sizes=(3,))
    task = tiny.stream((3,), per_class=3)[0]  # 9 images in batches of 8: the last would be alone
    sgd(net, task.train, local_loss(net, 0), tiny.context({"batch_size": 8}), 0)
    assert all(torch.isfinite(p).all() for p in net.parameters())


def test_epochs_are_shuffled_differently_and_tasks_too() -> None:
    seeds = Seeds(1)
    orders = {
        tuple(torch.cat(batches(30, 8, seeds.generator("loader", t, e))).tolist())
        for t in (0, 1)
        for e in (0, 1)
    }
    assert len(orders) == 4


def test_plain_batches_give_every_image_once_in_order(tiny) -> None:
    task = tiny.stream((3,), per_class=3)[0]
    pairs = list(plain_batches(task.train, tiny.context({"batch_size": 4}), "x"))
    assert torch.equal(torch.cat([y for _, y in pairs]), task.train.labels)
    pixels = task.train.pixels[task.train.rows]
    torch.testing.assert_close(torch.cat([x for x, _ in pairs]), pixels.float() / 127.5 - 1)


# --- divergence ------------------------------------------------------------------------------------


def test_a_loss_that_is_not_a_number_says_where(tiny) -> None:
    net, task, calls = tiny.net(sizes=(2,)), tiny.stream((2,), per_class=16)[0], []

    def loss(batch: Batch) -> Tensor:
        calls.append(1)
        return net(batch.images).sum() * (float("nan") if len(calls) == 7 else 1.0)

    with pytest.raises(CofimaError) as caught:
        sgd(net, task.train, loss, tiny.context({"batch_size": 8, "epochs": 3, "lr": 1e-6}), task=4)
    assert "nan in task 5, epoch 2, step 3" in str(caught.value)
    assert "train.lr" in str(caught.value)


def test_an_absurd_rate_is_stopped(tiny) -> None:
    net, task = tiny.net(sizes=(2,)), tiny.stream((2,))[0]
    with pytest.raises(CofimaError, match="task 1, epoch"):
        sgd(net, task.train, local_loss(net, 0), tiny.context({"lr": 1e25, "backbone_lr_scale": 1}), 0)


@pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
def test_the_very_last_step_may_not_poison_the_weights_unseen(network: str, tiny) -> None:
    """Its loss was still a number; what it left behind is not."""
    net, task = tiny.net(network, sizes=(2,)), tiny.stream((2,))[0]
    how = {"epochs": 1, "batch_size": 24, "lr": 1e37, "backbone_lr_scale": 1, "momentum": 0.0}
    with pytest.raises(
        CofimaError, match="in the last step of task 1; the state after the task before is kept"
    ):
        sgd(net, task.train, lambda batch: 1e9 * local_loss(net, 0)(batch), tiny.context(how), 0)


# --- options ---------------------------------------------------------------------------------------


IMPOSSIBLE: list[dict[str, object]] = [
    {"epochs": -1},
    {"epochs": 2.5},
    {"batch_size": 0},
    {"lr": 0},
    {"lr": -1},
    {"lr": float("nan")},
    {"lr": float("inf")},
    {"weight_decay": float("inf")},
    {"backbone_lr_scale": -0.1},
    {"backbone_lr_scale": float("nan")},
    {"momentum": 1.0},
    {"momentum": -0.1},
    {"gamma": 0},
    {"gamma": 1.5},
    {"weight_decay": -1e-9},
    {"milestones": [25]},
    {"milestones": [0]},
    {"milestones": [-1]},
    {"epochs": 5, "milestones": [5]},
    {"precision": "fp16"},
    {"epoch": 3},
]


def test_impossible_options_are_refused(subtests: pytest.Subtests) -> None:
    for wrong in IMPOSSIBLE:
        with subtests.test(wrong=wrong), pytest.raises(ValidationError):
            TrainOptions(**wrong)


def test_no_epochs_train_nothing(tiny, same_bits) -> None:
    net = tiny.net("resnet_test", sizes=(2,))
    before = copy.deepcopy(net.state_dict())
    task = tiny.stream((2,))[0]
    sgd(net, task.train, local_loss(net, 0), tiny.context({"epochs": 0}), 0)
    same_bits(net.state_dict(), before)
    assert not net.training


def test_a_device_that_is_not_here_is_refused() -> None:
    assert device.choose("cpu") == torch.device("cpu")
    for name in ("cuda:7", "nonsense", "", "cpu:x"):
        if not (name.startswith("cuda") and torch.cuda.is_available()):
            with pytest.raises(CofimaError, match="device = "):
                device.choose(name)


# --- scores ----------------------------------------------------------------------------------------


def test_scores_count_what_was_right(tiny) -> None:
    stream = tiny.stream((2, 1, 3), per_class=8)
    truth = torch.cat([task.test.labels for task in stream])
    wrong = truth.clone()
    wrong[0] = 5  # of 8 test images of task 1
    wrong[8] = 0  # of 4 test images of task 2: its own task has one class only, so task-aware it is right
    logits = torch.nn.functional.one_hot(wrong, 6).float()
    given = iter(torch.split(logits, [len(t.test) for t in stream]))
    score = evaluate(lambda x: next(given), stream, tiny.context({"batch_size": 64}))
    assert score.sizes == [8, 4, 12]
    assert score.accuracy == pytest.approx([87.5, 75.0, 100.0])
    assert score.task_aware[1:] == pytest.approx([100.0, 100.0])
    assert all(0 <= a <= 100 for a in score.top5)


def test_top5_of_few_classes_is_certain(tiny) -> None:
    stream = tiny.stream((2, 2), per_class=4)
    score = evaluate(lambda x: torch.zeros(len(x), 4), stream, tiny.context())
    assert score.top5 == [100.0, 100.0]


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :4]


def test_training_reads_its_images_only_through_batch(tiny, spied_images) -> None:
    count: list[int] = []
    images: ImageSet = spied_images(tiny.stream((2,), per_class=8)[0].train, lambda: count.append(1))
    net = Net(Flat(), 4, [2])
    sgd(net, images, local_loss(net, 0), tiny.context({"epochs": 3, "batch_size": 8}), 0)
    assert len(count) == 6


def test_a_cosine_has_no_milestones() -> None:
    assert TrainOptions(schedule="cosine").milestones is None
    with pytest.raises(ValueError, match="milestones are of schedule=steps"):
        TrainOptions(schedule="cosine", milestones=(3,))
