"""DualPrompt: a prefix for all tasks, one for each, keys to keys and values to values."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, softmax

from cofima.core.errors import CofimaError
from cofima.experiment.config import check
from cofima.experiment.launch import launch
from cofima.models.net import Net


def started(tiny: Any, task: int = 1, train: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a model that has begun a task, and the task."""
    stream = tiny.stream((2, 3), per_class=6)
    model = tiny.model(tiny.config("dual_prompt", options=options, train=train or {}), stream)
    for index in range(task):
        model.method.learn(stream[index])
    model.method.task, model.method.facts = stream[task], {"seconds": {}, "notes": []}
    model.method.begin(stream[task])
    model.method.net.eval()
    return model, stream[task]


def images_of(model: Any, task: Any, count: int = 8) -> Any:
    pixels, labels = task.train.batch(torch.arange(0, len(task.train), len(task.train) // count)[:count])
    return model.view.test(pixels), labels


def by_hand(net: Net, image: Tensor, prefix: dict[int, Tensor]) -> Tensor:
    """Return the logits of one image with its prefixes [2, length, width] per layer, written out."""
    vit = net.backbone
    x = torch.cat([vit.cls_token[0], vit.patch_embed(image[None])[0]]) + vit.pos_embed[0]
    for layer, block in enumerate(vit.blocks):
        q, k, v = block.attn.qkv(block.norm1(x)).chunk(3, dim=1)
        keys, values = torch.cat([prefix[layer][0], k]), torch.cat([prefix[layer][1], v])
        heads = [
            softmax(a @ b.T / a.shape[1] ** 0.5, dim=1) @ c
            for a, b, c in zip(*(m.chunk(2, dim=1) for m in (q, keys, values)), strict=True)
        ]
        x = x + block.attn.proj(torch.cat(heads, dim=1))
        x = x + block.mlp(block.norm2(x))
    return net.head(vit.norm(x)[None, 0])[0]


@pytest.mark.parametrize("fused", [True, False])
def test_prefixes_map_keys_to_keys_and_values_to_values_for_every_image(fused: bool, tiny) -> None:
    model, task = started(tiny)
    method = model.method
    method.net.double()
    for block in method.net.backbone.blocks:
        block.attn.fused_attn = fused
    images = images_of(model, task)[0].double()
    queries = method.net.backbone(images)
    for block, query in zip(method.pool.keys, (queries[:1], queries[-1:]), strict=True):
        block.data[:] = query  # so that both prefixes are in use
    state, logits = method.state(), method.predict(images)
    used = set()
    for image, query, row in zip(images, queries, logits, strict=True):
        near = [float(cosine_similarity(query, key, dim=0)) for key in state["keys"]]
        own = near.index(max(near))
        used.add(own)
        prefix = {0: state["shared"][0], 1: state["prompts"][own, 0]}
        torch.testing.assert_close(row, by_hand(method.net, image, prefix), rtol=1e-9, atol=1e-9)
        wrong = {layer: value.flip(0) for layer, value in prefix.items()}
        assert not torch.allclose(row, by_hand(method.net, image, wrong), rtol=1e-3)
    assert used == {0, 1}


def test_predictions_do_not_depend_on_the_batch(tiny) -> None:
    model, task = started(tiny)
    queries = model.method.net.backbone(images_of(model, task, 9)[0])
    for block, query in zip(model.method.pool.keys, (queries[:1], queries[-1:]), strict=True):
        block.data[:] = query
    for kind, near in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        model.method.net.to(kind)
        images = images_of(model, task, 9)[0].to(kind)
        assert len(set(model.method.nearest(model.method.similarity(images)).flatten().tolist())) == 2
        whole = model.method.predict(images)
        single = torch.cat([model.method.predict(image[None]) for image in images])
        order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(single, whole, rtol=near, atol=near)
        torch.testing.assert_close(model.method.predict(images[order]), whole[order], rtol=near, atol=near)


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_the_loss_equals_a_computation_by_hand(gamma: float, tiny) -> None:
    model, task = started(tiny, gamma=gamma)
    method = model.method
    method.net.double()
    images, labels = images_of(model, task)
    images, state = images.double(), method.state()
    prefix = {0: state["shared"][0], 1: state["prompts"][1, 0]}  # the task's own, whichever key is nearest
    logits = torch.stack([by_hand(method.net, image, prefix) for image in images])
    pull = cosine_similarity(method.net.backbone(images), state["keys"][1:], dim=1).mean()
    slow = cross_entropy(logits[:, 2:], labels - 2) - gamma * pull
    torch.testing.assert_close(method.loss(tiny.batch(images, labels)), slow, rtol=1e-9, atol=1e-9)


def test_a_new_prefix_starts_from_the_one_before_but_its_key_does_not(tiny) -> None:
    model, _ = started(tiny)
    state = model.method.state()
    assert torch.equal(state["prompts"][1], state["prompts"][0])
    assert not torch.equal(state["keys"][1], state["keys"][0])
    assert state["keys"][1].abs().max() <= 1
    first, _ = started(tiny, task=0)
    assert not torch.equal(state["prompts"][0], first.method.state()["prompts"][0])  # which was trained


def test_only_the_task_s_own_prefix_the_shared_one_and_new_rows_move(tiny, same_bits) -> None:
    model, task = started(tiny, train={"epochs": 2})
    method = model.method
    before = copy.deepcopy(method.net.state_dict())
    method.train(task)
    after = method.net.state_dict()
    old = ("backbone.", "head.blocks.0.", "prompts.prompts.0", "prompts.keys.0")
    frozen = {k for k in before if k.startswith(old)}
    same_bits({k: after[k] for k in frozen}, {k: before[k] for k in frozen})
    assert {k for k in before if not torch.equal(before[k], after[k])} == set(before) - frozen
    assert {"shared", "prompts.prompts.1", "prompts.keys.1"} <= set(before) - frozen
    assert all(p.grad is None for p in method.net.parameters())


def test_gradients_reach_nothing_else(tiny) -> None:
    model, task = started(tiny)
    model.method.loss(tiny.batch(*images_of(model, task))).backward()
    reached = {k for k, p in model.method.net.named_parameters() if p.grad is not None and p.grad.any()}
    own = {"shared", "prompts.prompts.1", "prompts.keys.1"}
    assert reached == own | {"head.blocks.1.weight", "head.blocks.1.bias"}


def test_old_prefixes_and_keys_stay_through_all_later_tasks_and_any_number_of_them(tiny) -> None:
    stream = tiny.stream((1,) * 12, per_class=4)  # more than the ten of public code
    model = tiny.model(tiny.config("dual_prompt", train={"epochs": 1}), stream)
    seen: list[dict[str, Tensor]] = []
    for task in stream:
        model.method.learn(task)
        state = model.method.state()
        assert len(state["prompts"]) == len(state["keys"]) == task.index + 1
        for before in seen:
            count = len(before["keys"])
            assert torch.equal(state["keys"][:count], before["keys"])
            assert torch.equal(state["prompts"][:count], before["prompts"])
        seen.append({key: value.clone() for key, value in state.items()})


def test_the_number_of_tasks_planned_is_of_no_consequence(tiny, same_bits) -> None:
    made = []
    for planned in (2, 30):
        stream = tiny.stream((2, 2), per_class=4)
        model = tiny.model(tiny.config("dual_prompt", train={"epochs": 1}), stream)
        object.__setattr__(model.method.context, "tasks", planned)
        for task in stream:
            model.method.learn(task)
        made.append(model.method.state())
    same_bits(*made)


def test_without_layers_it_is_the_plain_frozen_network(tiny) -> None:
    model, task = started(tiny, train={"epochs": 1}, g_layers=(), e_layers=())
    model.method.train(task)
    images = images_of(model, task)[0]
    assert torch.equal(model.method.predict(images), model.method.net(images))


def test_state_and_restore(tiny, same_bits) -> None:
    model, task = started(tiny)
    other, _ = started(tiny, task=0)
    other.method.restore(model.method.state())
    same_bits(other.method.state(), model.method.state())
    assert not any(value.requires_grad for value in model.method.state().values())
    other.method.net.head = copy.deepcopy(model.method.net.head)
    images = images_of(model, task)[0]
    assert torch.equal(other.method.predict(images), model.method.predict(images))


def test_the_backbone_is_plain_timm_at_the_end(tiny, tmp_path: Path, same_bits) -> None:
    config = tiny.config("dual_prompt", train={"epochs": 1})
    model = tiny.run(tmp_path, config, tiny.stream((2, 1, 2), per_class=6))
    net = tiny.net(seed=3)  # of the configuration
    same_bits(model.method.net.backbone.state_dict(), net.backbone.state_dict())
    images = images_of(model, tiny.stream()[0])[0]
    assert torch.equal(model.method.net.backbone(images), net.backbone.eval()(images))
    assert not [m for m in model.method.net.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_layers_that_the_backbone_does_not_have_are_refused_before_any_work(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cofima.data.datasets.load", lambda *_, **__: pytest.fail("images were read"))
    config = tiny.config("dual_prompt", options={"g_layers": (0, 1), "e_layers": (2, 3, 4)})
    with pytest.raises(CofimaError, match=r"e_layers: there is no layer 2 and 3 and 4 .* run from 0 to 1"):
        launch(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_layer_is_named_once() -> None:
    for options in ({"g_layers": [0, 2]}, {"e_layers": [2, 2]}):
        with pytest.raises(CofimaError, match="layer 2 is there twice"):
            check({"method": "dual_prompt", "options": options})
    with pytest.raises(CofimaError, match="greater than or equal to 0"):
        check({"method": "dual_prompt", "options": {"g_layers": [-1]}})
