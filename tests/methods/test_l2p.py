"""L2P: a pool of prompts, found by key, for a backbone that never moves."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch.nn.functional import cosine_similarity, cross_entropy

from cofima.core.errors import CofimaError
from cofima.experiment.config import check
from cofima.methods.components.prompts import mean_of_tokens


def started(tiny: Any, task: int = 1, train: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a model that has begun a task, and the task."""
    stream = tiny.stream((2, 3), per_class=6)
    model = tiny.model(tiny.config("l2p", options=options, train=train or {}), stream)
    for index in range(task):
        model.method.learn(stream[index])
    model.method.task, model.method.facts = stream[task], {"seconds": {}, "notes": []}
    model.method.begin(stream[task])
    model.method.net.eval()
    return model, stream[task]


def images_of(model: Any, task: Any, count: int = 8) -> Any:
    pixels, labels = task.train.batch(torch.arange(0, len(task.train), len(task.train) // count)[:count])
    return model.view.test(pixels), labels


def doubled(model: Any) -> Any:
    model.method.net.double()
    return model


def test_predictions_do_not_depend_on_the_batch(tiny) -> None:
    model, task = started(tiny, prompts=6, top_k=2)
    for vote in (False, True):
        model.method.vote = vote  # of training alone
        for kind, near in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
            model.method.net.to(kind)
            images = images_of(model, task, 9)[0].to(kind)
            chosen = model.method.nearest(model.method.similarity(images))
            assert len({tuple(row.sort().values.tolist()) for row in chosen}) > 1  # or it proves nothing
            whole = model.method.predict(images)
            single = torch.cat([model.method.predict(image[None]) for image in images])
            order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
            torch.testing.assert_close(single, whole, rtol=near, atol=near)
            torch.testing.assert_close(
                model.method.predict(images[order]), whole[order], rtol=near, atol=near
            )
        model.method.net.float()


@pytest.mark.parametrize("gamma", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("vote", [False, True])
def test_the_loss_equals_a_computation_by_hand(gamma: float, vote: bool, tiny) -> None:
    model, task = started(tiny, gamma=gamma, vote=vote, prompts=6, top_k=2, length=3)
    method = doubled(model).method
    images, labels = images_of(model, task)
    images = images.double()
    prompts, keys = (method.pool.state()[name] for name in ("prompts", "keys"))
    queries = method.net.backbone(images)
    chosen = []
    for query in queries:
        near = [float(cosine_similarity(query, key, dim=0)) for key in keys]
        chosen.append(sorted(range(6), key=lambda i: -near[i])[:2])
    if vote:
        votes = [sum(i in own for own in chosen) for i in range(6)]
        chosen = [sorted(range(6), key=lambda i: -votes[i])[:2]] * len(images)
    total = 0.0
    for image, label, query, own in zip(images, labels, queries, chosen, strict=True):
        tokens = torch.cat([prompts[i] for i in own])[None]
        logits = method.net.head(mean_of_tokens(method.net.backbone, image[None], tokens))
        total += cross_entropy(logits[:, 2:], label[None] - 2)
        total -= gamma * sum(cosine_similarity(query, keys[i], dim=0) for i in own)
    torch.testing.assert_close(
        method.loss(tiny.batch(images, labels)), total / len(images), rtol=1e-9, atol=1e-9
    )


def test_only_prompts_keys_and_new_rows_move(tiny, same_bits) -> None:
    model, task = started(tiny, train={"epochs": 2})
    method = model.method
    before = copy.deepcopy(method.net.state_dict())
    method.train(task)
    after = method.net.state_dict()
    frozen = {k for k in before if k.startswith(("backbone.", "head.blocks.0."))}
    same_bits({k: after[k] for k in frozen}, {k: before[k] for k in frozen})
    moved = {k for k in before if not torch.equal(before[k], after[k])}
    assert moved == set(before) - frozen
    assert not any(p.requires_grad for p in method.net.backbone.parameters())
    assert all(p.grad is None for p in method.net.parameters())


def test_gradients_reach_nothing_else(tiny) -> None:
    model, task = started(tiny)
    model.method.loss(tiny.batch(*images_of(model, task))).backward()
    reached = {k for k, p in model.method.net.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == {"head.blocks.1.weight", "head.blocks.1.bias", "prompts.prompts.0", "prompts.keys.0"}


def test_prompts_that_nobody_chose_stay_as_they_are(tiny) -> None:
    model, task = started(tiny, prompts=40, top_k=1, train={"epochs": 1})
    method, used = model.method, set()
    before, choose = method.pool.state(), method.choose

    def spied(similarity: torch.Tensor) -> torch.Tensor:
        chosen = choose(similarity)
        used.update(chosen.flatten().tolist())
        return chosen

    method.choose = spied
    method.train(task)
    after = method.pool.state()
    assert 0 < len(used) < 40
    for name in ("prompts", "keys"):
        same = [torch.equal(a, b) for a, b in zip(before[name], after[name], strict=True)]
        assert [place for place in range(40) if not same[place]] == sorted(used)


def test_keys_are_pulled_towards_the_queries(tiny) -> None:
    near = {}
    for gamma in (0.0, 1.0):
        model, task = started(tiny, task=0, gamma=gamma, lr=0.5, prompts=1, top_k=1, train={"epochs": 6})
        model.method.train(task)
        near[gamma] = model.method.similarity(images_of(model, task)[0]).mean().item()
    assert near[1.0] > near[0.0] + 0.1


def test_the_rate_follows_the_batch_and_stays_constant(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = torch.optim.Adam.step

    def spied(self: torch.optim.Adam, *rest: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *rest)

    monkeypatch.setattr(torch.optim.Adam, "step", spied)
    model, task = started(tiny, task=0, lr=0.03, train={"epochs": 10, "batch_size": 8})
    model.method.train(task)
    assert set(rates) == {0.03 * 8 / 256}
    rates.clear()
    model, task = started(tiny, task=0, lr=0.03, train={"epochs": 2, "batch_size": 64, "milestones": [1]})
    model.method.train(task)
    assert rates == pytest.approx([0.03 / 4, 0.003 / 4])


def test_the_pool_is_one_size_and_the_backbone_is_plain_timm_at_the_end(
    tiny, tmp_path: Path, same_bits
) -> None:
    config = tiny.config("l2p", train={"epochs": 1}, options={"length": 5, "top_k": 5})
    model = tiny.run(tmp_path, config, tiny.stream((2, 1, 2), per_class=6))
    assert {row.state_bytes for row in model.history} == {(10 * 5 + 10) * 16 * 4}
    net = tiny.net(seed=3)  # of the configuration
    same_bits(model.method.net.backbone.state_dict(), net.backbone.state_dict())
    images = images_of(model, tiny.stream()[0])[0]
    assert torch.equal(model.method.net.backbone(images), net.backbone.eval()(images))
    assert not [m for m in model.method.net.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert {row.distance.from_start for row in model.history} == {0.0}


def test_state_and_restore(tiny, same_bits) -> None:
    model, _ = started(tiny)
    other, _ = started(tiny, task=0)
    other.method.restore(model.method.state())
    same_bits(other.method.state(), model.method.state())
    assert all(p.requires_grad for p in other.method.pool.parameters())  # they go on learning
    assert not any(value.requires_grad for value in model.method.state().values())


def test_more_prompts_than_there_are_cannot_be_taken() -> None:
    with pytest.raises(CofimaError, match="top_k = 7: the pool has only 6"):
        check({"method": "l2p", "options": {"prompts": 6, "top_k": 7}})


@pytest.mark.parametrize("precise", [{"drop_path_rate": 0.9}, {"proj_drop_rate": 0.9}])
def test_a_frozen_backbone_drops_nothing_in_training(precise: dict[str, float], tiny, monkeypatch) -> None:
    """Queries and outputs are those of test time, also where the backbone was built with dropout."""
    model, task = started(tiny, task=0, train={"epochs": 1})
    net = model.method.net
    noisy = timm.create_model("vit_test", num_classes=0, **precise)
    noisy.load_state_dict(net.backbone.state_dict())
    net.backbone = noisy.requires_grad_(False)
    images = images_of(model, task)[0]
    plain, seen = noisy.eval()(images), []
    monkeypatch.setattr(model.method, "after_step", lambda _: seen.append(torch.equal(noisy(images), plain)))
    model.method.train(task)
    assert seen
    assert all(seen)
