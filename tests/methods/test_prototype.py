"""Prototypes: the means of all images, whatever the order; predictions by cosine; plain timm."""

from pathlib import Path

import pytest
import timm
import torch
from torch.nn.functional import cosine_similarity

from cofima.data.sources.in_memory import blobs
from cofima.data.stream import from_groups
from cofima.store import model_folder
from cofima.training.loop import plain_batches
from cofima.weights import snapshot

both = pytest.mark.parametrize("network", ["vit_test", "resnet_test"])


def learned(tiny, network, groups):
    stream = from_groups(blobs(6, 12, 16), groups)
    method = tiny.model(tiny.config("prototype", network), stream).method
    for task in stream:
        method.learn(task)
    return method, stream


def joint_means(method, stream):
    """Return the mean feature of each class over all images at once."""
    method.net.eval()
    everything = stream.merged()[0].train
    with torch.no_grad():
        pairs = [
            (method.net.features(x).double(), y) for x, y in plain_batches(everything, method.context, "")
        ]
    features, labels = (torch.cat(part) for part in zip(*pairs, strict=True))
    return torch.stack([features[labels == label].mean(0) for label in range(int(labels.max()) + 1)])


@both
def test_the_rows_are_the_joint_means_in_any_order_of_tasks(network: str, tiny) -> None:
    rows = {}
    for groups in ([[0, 1, 2], [3], [4, 5]], [[5], [2, 4], [0], [1, 3]], [[3, 0, 5, 1, 4, 2]]):
        method, stream = learned(tiny, network, groups)
        flat = method.head().flat()
        means = joint_means(method, stream)
        torch.testing.assert_close(
            flat["weight"].double(), means / means.norm(dim=1, keepdim=True), rtol=1e-5, atol=1e-6
        )
        assert not flat["bias"].any()
        order = [name for task in stream for name in task.names]
        rows[str(groups)] = torch.stack([flat["weight"][order.index(f"blob {k}")] for k in range(6)])
    first, *others = rows.values()
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first.norm(dim=1), torch.ones(6))


@both
def test_predictions_are_those_of_the_cosine(network: str, tiny) -> None:
    method, stream = learned(tiny, network, [[0, 1], [2], [3, 4, 5]])
    means = joint_means(method, stream)
    images = method.context.view.test(stream.merged()[0].test.batch(torch.arange(36))[0])
    with torch.no_grad():
        features, logits = method.net.features(images).double(), method.predict(images).double()
    cosines = cosine_similarity(features[:, None], means[None], dim=2)
    torch.testing.assert_close(logits / features.norm(dim=1, keepdim=True), cosines, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits.argmax(1), cosines.argmax(1))


@both
def test_the_backbone_is_never_touched(network: str, tiny, same_bits) -> None:
    stream = tiny.stream((2, 1, 2))
    method = tiny.model(tiny.config("prototype", network), stream).method
    start = snapshot(method.net.backbone)
    for task in stream:
        method.learn(task)
    same_bits(snapshot(method.net.backbone), start)
    assert method.state() == {}


def test_each_image_is_looked_at_once(tiny, spied_images) -> None:
    from dataclasses import replace

    stream = tiny.stream((2, 2))
    method = tiny.model(tiny.config("prototype"), stream).method
    calls: list = []
    for task in stream:
        method.learn(replace(task, train=spied_images(task.train, lambda: calls.append(1))))
    assert len(calls) == 2  # two tasks of 24 images, which pass as one batch each


@both
def test_the_model_file_predicts_in_plain_timm(network: str, tiny, tmp_path: Path) -> None:
    stream = tiny.stream((2, 1, 2))
    model = tiny.run(tmp_path, tiny.config("prototype", network), stream)
    plain = timm.create_model(network, num_classes=5)
    plain.load_state_dict(model_folder.read(tmp_path).weights())
    pixels = stream.merged()[0].test.batch(torch.arange(30))[0]
    with torch.no_grad():
        logits = plain.eval()(model.view.test(pixels))
    torch.testing.assert_close(logits, model.logits(pixels))
