"""Joint: everything at once, as one task."""

from pathlib import Path

import pytest

from cofima.experiment.launch import launch


def test_the_stream_becomes_one_task_with_all_classes_and_images(tiny) -> None:
    stream = tiny.stream((3, 1, 2))
    model = tiny.model(tiny.config("joint"), stream)
    (task,) = model.method.stream(stream)
    assert (model.planned, task.index, task.classes) == (1, 0, range(6))
    assert task.names == stream.class_names
    assert len(task.train) == sum(len(t.train) for t in stream)
    assert sorted(task.train.rows.tolist()) == sorted(r for t in stream for r in t.train.rows.tolist())
    assert set(task.train.rows.tolist()).isdisjoint(task.test.rows.tolist())


@pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
def test_it_is_fine_tuning_on_a_single_task_of_all_classes(network: str, tiny, same_bits) -> None:
    stream = tiny.stream((6,))
    made = []
    for method in ("joint", "seq_ft"):
        model = tiny.model(tiny.config(method, network, train={"epochs": 1}), stream)
        model.method.learn(model.method.stream(stream)[0])
        made.append(model.weights())
    same_bits(*made)


def test_it_is_the_upper_bound(tiny, tmp_path: Path) -> None:
    train = {"epochs": 8, "lr": 0.02}
    joint = launch(tiny.config("joint", train=train), tmp_path / "joint")
    others = launch(tiny.config("seq_ft", train=train), tmp_path / "other")
    assert len(joint.history) == 1
    last = others.history[-1].accuracy
    assert joint.history[0].accuracy[0] > 80 > sum(last) / len(last)
