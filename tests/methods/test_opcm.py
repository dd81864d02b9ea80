"""OPCM: the slow definition with whole bases, where training starts, the merged length, its state."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cofima.store.model import load_model
from cofima.weights import snapshot
from cofima.weights.task_vectors import outside

both = pytest.mark.parametrize("network", ["vit_test", "resnet_test"])


def made(tiny, network="vit_test", sizes=(2, 2, 2), **options):
    stream = tiny.stream(sizes, per_class=8)
    config = tiny.config("opcm", network, train={"epochs": 2}, options=options)
    return tiny.model(config, stream).method, stream


def slow(merged: Tensor, vector: Tensor, alpha: float) -> Tensor:
    """Write the vector in the whole bases of a matrix of full rank, delete coordinates, and write it back."""
    u, s, vh = torch.linalg.svd(merged, full_matrices=True)
    main = 0
    while main < len(s) and float(s[: main + 1].sum() / s.sum()) <= alpha + 1e-12:
        main += 1
    coordinates = u.T @ vector @ vh.T
    for i in range(len(u)):
        for j in range(len(vh)):
            if i == j or (i < main and j < main):
                coordinates[i, j] = 0
    return u @ coordinates @ vh


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 4)], ids=str)
def test_what_lies_outside_is_that_of_the_slow_definition(shape: tuple[int, int], alpha: float) -> None:
    draw = torch.Generator().manual_seed(3)
    merged, vector = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(outside(merged, vector, alpha), slow(merged, vector, alpha))


def test_laws_of_what_lies_outside() -> None:
    draw = torch.Generator().manual_seed(3)
    merged, vector = (torch.randn(6, 5, generator=draw, dtype=torch.float64) for _ in range(2))
    for alpha in (0.0, 0.5, 1.0):
        found = outside(merged, vector, alpha)
        # no direction of the merged vector becomes longer or shorter; nothing is left to take a second time
        assert float((found * merged).sum()) == pytest.approx(0, abs=1e-9)
        torch.testing.assert_close(outside(merged, found, alpha), found)
        torch.testing.assert_close(
            outside(merged, merged, alpha), torch.zeros_like(merged), atol=1e-9, rtol=0
        )
        assert found.norm() <= vector.norm()
    nothing = torch.zeros_like(vector)
    torch.testing.assert_close(
        outside(nothing, vector, 0.5), vector
    )  # where nothing was learned, all is free
    one = torch.outer(merged[:, 0], vector[0])
    torch.testing.assert_close(outside(one, vector, 1.0), outside(one, vector, 0.0))  # of one direction


@both
def test_tasks_start_from_the_pretrained_weights_and_the_first_is_kept_whole(
    network: str, tiny, trained: list, same_bits
) -> None:
    method, stream = made(tiny, network)
    start = snapshot(method.net.backbone)
    for task in stream:
        method.learn(task)
        same_bits(trained[-1][0], start)
        if task.index == 0:
            same_bits(snapshot(method.net.backbone), trained[0][1])
            assert method.facts["lam"] == 1


@both
def test_the_network_is_the_start_and_the_merged_vector(network: str, tiny, trained: list) -> None:
    method, stream = made(tiny, network, alpha=0.4)
    start = {k: v.double() for k, v in snapshot(method.net.backbone).items() if v.is_floating_point()}
    parameters = [key for key, _ in method.net.backbone.named_parameters()]
    dense = {
        f"{name}.weight"
        for name, layer in method.net.backbone.named_modules()
        if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
    }
    merged: dict[str, Tensor] = {}
    scale, lengths = 1.0, []
    for task in stream:
        method.learn(task)
        new = {key: trained[-1][1][key].double() - start[key] for key in parameters}
        lengths.append(float(torch.cat([v.flatten() for v in new.values()]).norm()))
        if not merged:
            merged = new
        else:
            for key, vector in new.items():
                if key in dense:
                    matrix = merged[key].flatten(1)
                    new[key] = outside(matrix, vector.flatten(1), 0.4).view_as(vector)
            merged = {key: scale * merged[key] + new[key] for key in parameters}
            scale = float(torch.cat([v.flatten() for v in merged.values()]).norm()) / (
                sum(lengths) / len(lengths)
            )
            merged = {key: value / scale for key, value in merged.items()}
        now = dict(method.net.backbone.named_parameters())
        for key in parameters:
            torch.testing.assert_close(
                now[key].detach().double(), start[key] + merged[key], rtol=1e-4, atol=1e-6
            )
        moved = torch.cat([(now[key].detach().double() - start[key]).flatten() for key in parameters]).norm()
        assert float(moved) == pytest.approx(sum(lengths) / len(lengths), rel=1e-4)


def test_a_task_that_moves_nothing_keeps_the_direction(tiny) -> None:
    """Only the length falls, to the mean of all tasks'."""
    method, stream = made(tiny, sizes=(2, 2))
    method.learn(stream[0])
    before = {key: value.clone() for key, value in method.vector.items()}
    still = method.context.train.model_copy(update={"backbone_lr_scale": 0.0})
    method.context = replace(method.context, train=still)
    method.learn(stream[1])
    for key, value in method.vector.items():
        torch.testing.assert_close(value, before[key] / 2, rtol=1e-5, atol=1e-8)


def test_a_folder_goes_on_as_the_model_would_have(tiny, tmp_path: Path, same_bits) -> None:
    stream = tiny.stream((2, 2, 2))
    model = tiny.run(tmp_path, tiny.config("opcm", train={"epochs": 2}), stream)
    method = load_model(tmp_path).method
    same_bits(method.vector, model.method.vector)
    same_bits({"sum": method.lengths}, {"sum": model.method.lengths})
    assert method.lengths[1] == 3
    assert float(method.scale) == float(model.method.scale)
    for key, value in method.net.backbone.named_parameters():
        torch.testing.assert_close(
            value.detach(), method.start[key] + method.vector[key], rtol=1e-6, atol=1e-7
        )
