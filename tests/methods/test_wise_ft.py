"""WiSE-FT: the limits, the average with the pre-trained weights, the first task."""

from pathlib import Path

import pytest
import torch

from cofima.core.errors import CofimaError
from cofima.methods.components.aligned import Aligned
from cofima.store.model import load_model
from cofima.weights import average, snapshot

both = pytest.mark.parametrize("network", ["vit_test", "resnet_test"])


def made(tiny, method="wise_ft", network="vit_test", sizes=(2, 1, 2), **options):
    stream = tiny.stream(sizes, per_class=8)
    return tiny.model(
        tiny.config(method, network, train={"epochs": 2}, options=options), stream
    ).method, stream


@both
@pytest.mark.parametrize("merge_first", [True, False])
def test_all_new_is_slca(network: str, merge_first: bool, tiny, same_bits) -> None:
    ours, stream = made(tiny, network=network, lam=1.0, merge_first=merge_first)
    slca, _ = made(tiny, "slca", network)
    for task in stream:
        ours.learn(task)
        slca.learn(task)
        same_bits(ours.net.state_dict(), slca.net.state_dict())
        same_bits(ours.head().state_dict(), slca.head().state_dict())
        state = {k: v for k, v in ours.state().items() if not k.startswith("start.")}
        same_bits(state, slca.state())


@both
def test_none_new_keeps_the_pretrained_backbone(network: str, tiny, same_bits) -> None:
    method, stream = made(tiny, network=network, lam=0.0)
    start = snapshot(method.net.backbone)
    for task in stream:
        method.learn(task)
        now = method.net.backbone.state_dict()
        floating = {k for k, v in now.items() if v.is_floating_point()}
        assert floating | {k for k in now if "num_batches_tracked" in k} == set(now)
        same_bits({k: now[k] for k in floating}, {k: start[k] for k in floating})


@both
@pytest.mark.parametrize("merge_first", [True, False])
def test_each_merge_is_with_the_pretrained_weights(
    network: str, merge_first: bool, tiny, trained: list, same_bits
) -> None:
    method, stream = made(tiny, network=network, lam=0.3, merge_first=merge_first)
    start = snapshot(method.net.backbone)
    merged = start
    for task in stream:
        method.learn(task)
        began, after = trained[-1]
        same_bits(began, merged)  # the next task goes on from the merged weights
        merges = merge_first or task.index > 0
        assert method.facts["lam"] == (0.3 if merges else None)
        merged = snapshot(method.net.backbone)
        statistics = {k for k in merged if "running" in k} if merges else set()  # estimated anew
        expected = average(start, after, 0.3) if merges else after
        same_bits(
            {k: merged[k] for k in merged.keys() - statistics},
            {k: expected[k] for k in merged.keys() - statistics},
        )


def test_the_merged_network_measures_its_own_batch_statistics(tiny) -> None:
    stream = tiny.stream((2, 2))
    config = tiny.config(
        "wise_ft", "resnet_test", train={"epochs": 2, "batch_size": 64}, options={"lam": 0.5}
    )
    method = tiny.model(config, stream).method
    method.learn(stream[0])
    seen = []
    method.net.backbone.bn1.register_forward_pre_hook(lambda m, x: seen.append(x[0]))
    images = method.context.view.test(stream[0].train.batch(torch.arange(len(stream[0].train)))[0])
    with torch.no_grad():
        method.net(images)
    torch.testing.assert_close(method.net.backbone.bn1.running_mean, seen[0].mean((0, 2, 3)))


def test_where_nothing_was_trained_batch_statistics_stay(tiny, same_bits) -> None:
    method, stream = made(tiny, network="resnet_test", sizes=(1, 2))
    start = snapshot(method.net.backbone)
    method.learn(stream[0])
    same_bits(snapshot(method.net.backbone), start)


def test_rows_of_the_head_are_as_trained(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    method, stream = made(tiny, lam=0.3)
    rows = []
    train = Aligned.train
    monkeypatch.setattr(
        Aligned,
        "train",
        lambda self, *given: (train(self, *given), rows.append(snapshot(self.net.head.blocks[-1])))[0],
    )
    for task in stream:
        method.learn(task)
    for block, row in zip(method.net.head.blocks, rows, strict=True):
        assert torch.equal(block.weight, row["weight"])


@pytest.mark.parametrize("lam", ["auto", 1.5, -0.1])
def test_no_other_lam_is_taken(lam: object, tiny) -> None:
    with pytest.raises(CofimaError, match=r"options\.lam"):
        tiny.config("wise_ft", options={"lam": lam})


def test_a_model_that_was_loaded_merges_with_the_same_weights(tiny, tmp_path: Path, same_bits) -> None:

    stream = tiny.stream((2, 2))
    model = tiny.model(tiny.config("wise_ft"), stream)
    start = snapshot(model.method.net.backbone)
    tiny.run(tmp_path, tiny.config("wise_ft"), stream)
    same_bits(load_model(tmp_path).method.start, start)


def test_the_history_tells_how_far_training_and_the_merge_went(tiny, tmp_path: Path) -> None:
    config = tiny.config("wise_ft", train={"epochs": 2}, options={"lam": 0.25})
    history = tiny.run(tmp_path, config, tiny.stream((2, 2, 2))).history
    assert history[0].lam == 0.25
    first = history[0].distance
    assert first.from_start == pytest.approx(0.25 * first.trained, rel=1e-4)
