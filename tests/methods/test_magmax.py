"""MagMax: the largest change of each weight, what predicts and what goes on, its limits, its state."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cofima import methods
from cofima.classifier.edit import remove_class
from cofima.data.image_set import concatenate
from cofima.methods.state import untagged
from cofima.store.model import load_model
from cofima.weights import snapshot

both = pytest.mark.parametrize("network", ["vit_test", "resnet_test"])


def made(tiny, method="magmax", network="vit_test", sizes=(2, 1, 2), **options):
    stream = tiny.stream(sizes, per_class=8)
    config = tiny.config(method, network, train={"epochs": 2}, options=options)
    return tiny.model(config, stream).method, stream


def largest(start: Tensor, models: list[Tensor]) -> Tensor:
    """The change of largest magnitude, number by number."""
    vectors = [(model - start).flatten().tolist() for model in models]
    chosen = [max(reversed(changes), key=abs) for changes in zip(*vectors, strict=True)]
    return torch.tensor(chosen).view(start.shape)


@both
def test_the_network_is_the_start_and_the_largest_changes(network: str, tiny, trained: list) -> None:
    method, stream = made(tiny, network=network, lam=0.3)
    start = snapshot(method.net.backbone)
    for task in stream:
        method.learn(task)
        assert method.facts["lam"] == 0.3
        for key, value in method.net.backbone.named_parameters():
            vector = largest(start[key], [after[key] for _, after in trained])
            torch.testing.assert_close(value.detach(), start[key] + 0.3 * vector, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(method.vector[key], vector, rtol=0, atol=0)


@both
def test_training_goes_on_where_it_ended_and_not_from_what_predicts(
    network: str, tiny, trained: list, same_bits
) -> None:
    method, stream = made(tiny, network=network)
    for task in stream:
        method.learn(task)
        if task.index:
            same_bits(trained[-1][0], trained[-2][1])
        same_bits(method.trained, trained[-1][1])


def test_the_chain_is_that_of_slca_whatever_lam_is(tiny, trained: list, same_bits) -> None:
    """Nothing of what predicts enters the training of a backbone, where tasks have several classes."""
    for name, options in (("magmax", {"lam": 0.2}), ("slca", {})):
        method, stream = made(tiny, name, sizes=(2, 2), **options)
        for task in stream:
            method.learn(task)
    for ours, theirs in zip(trained[:2], trained[2:], strict=True):
        same_bits(ours[1], theirs[1])


@both
def test_none_of_the_vector_keeps_the_pretrained_backbone(network: str, tiny, same_bits) -> None:
    method, stream = made(tiny, network=network, lam=0.0)
    start = {k: v for k, v in snapshot(method.net.backbone).items() if v.is_floating_point()}
    for task in stream:
        method.learn(task)
        now = method.net.backbone.state_dict()
        same_bits({k: now[k] for k in start}, start)


def test_all_of_the_first_vector_is_the_trained_network(tiny, trained: list) -> None:
    method, stream = made(tiny, network="resnet_test", lam=1.0)
    method.learn(stream[0])
    torch.testing.assert_close(snapshot(method.net.backbone), trained[0][1], rtol=1e-5, atol=1e-6)


def test_batch_statistics_are_those_of_the_merged_network(tiny) -> None:
    stream = tiny.stream((2, 2))
    train = {"epochs": 2, "batch_size": 64}
    for lam in (0.5, 1.0):
        config = tiny.config("magmax", "resnet_test", train=train, options={"lam": lam})
        method = tiny.model(config, stream).method
        for task in stream:
            method.learn(task)
        seen: list[Tensor] = []
        method.net.backbone.bn1.register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x[0]))
        images = method.context.view.test(stream[1].train.batch(torch.arange(len(stream[1].train)))[0])
        with torch.no_grad():
            method.net(images)
        torch.testing.assert_close(method.net.backbone.bn1.running_mean, seen[0].mean((0, 2, 3)))


def test_a_folder_holds_what_predicts_and_what_goes_on(tiny, tmp_path: Path, same_bits) -> None:
    stream = tiny.stream((2, 2, 2))
    config = tiny.config("magmax", train={"epochs": 2})
    model = tiny.run(tmp_path, config, stream)
    again = load_model(tmp_path)
    method = again.method
    same_bits(method.trained, model.method.trained)
    for key, value in method.net.backbone.named_parameters():
        torch.testing.assert_close(
            value.detach(), method.start[key] + 0.5 * method.vector[key], rtol=1e-6, atol=1e-7
        )
    assert any(not torch.equal(v, method.trained[k]) for k, v in method.net.backbone.named_parameters())
    kept = method.state()
    assert untagged("vector", kept).keys() == dict(method.net.backbone.named_parameters()).keys()
    assert untagged("start", kept).keys() == untagged("trained", kept).keys()


def test_the_state_does_not_grow_with_tasks_but_for_classes(tiny) -> None:
    method, stream = made(tiny, sizes=(2, 2, 2))
    sizes = []
    for task in stream:
        method.learn(task)
        backbones = {k: v for k, v in method.state().items() if not k.startswith(("gaussians", "raw_head"))}
        sizes.append(sum(v.numel() for v in backbones.values()))
    assert len(set(sizes)) == 1


def test_a_class_is_removed_and_more_images_are_learned(tiny, tmp_path: Path) -> None:
    stream = tiny.stream((2, 2, 1))
    tiny.run(tmp_path, tiny.config("magmax", train={"epochs": 1}), stream[:2])
    model = remove_class(load_model(tmp_path), stream[0].names[0])
    assert len(model.classes) == 3
    task = stream[2]
    labels = torch.full((len(task.train),), 1)  # more images of a class that it knows
    more = concatenate(type(task.train)(task.train.pixels, task.train.rows, labels))
    from dataclasses import replace

    model.method.learn(replace(task, train=more, classes=range(3, 3), known=(1,), names=()))
    assert model.logits(task.test.batch(torch.arange(2))[0]).shape == (2, 3)


def test_options() -> None:
    assert methods.options_of(methods.build("magmax"))["lam"] == 0.5
