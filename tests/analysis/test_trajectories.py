"""Trajectories of several runs in one plane."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cofima.analysis.plane import principal
from cofima.analysis.relearn import load_tasks
from cofima.analysis.run_folder import open_run
from cofima.analysis.trajectories import class_means, trajectories
from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT
from cofima.methods.cofima import CoFiMA
from cofima.models.backbone import build_empty
from cofima.weights import weight_distance
from cofima.weights.ops import snapshot


@pytest.fixture(scope="module")
def folders(kept: Any) -> list[Path]:
    """Return the paper's three kinds of runs: re-initialized, averaged over tasks, constant share."""
    mean = kept("weight_ensemble", options={"init": "previous"})
    return [kept("weight_ensemble"), mean, kept("coma")]


def test_the_three_ways_of_the_paper(folders: list[Path]) -> None:
    result = trajectories(folders, grid=5, images=4)
    assert len(result.rows) == 3 * 4 + 25
    ground = [row["accuracy_of_class_means"] for row in result.rows if row["run"] == ""]
    assert len(ground) == 25
    assert all(0 <= value <= 100 for value in ground)
    starts = [(row["x"], row["y"], row["beside"]) for row in result.rows if row["after"] == 0]
    assert starts[0] == starts[1] == starts[2]
    assert [row["lam"] for row in result.rows if row["after"] == 3] == [1 / 3, 1 / 3, 0.4]
    for folder in folders:  # a way in the plane is never longer than the way itself
        run = open_run(folder)
        rows = [row for row in result.rows if row["run"] == str(folder)]
        for t in range(3):
            drawn = np.hypot(rows[t + 1]["x"] - rows[t]["x"], rows[t + 1]["y"] - rows[t]["y"])
            assert drawn <= weight_distance(run.backbone(t), run.backbone(t + 1)) * (1 + 1e-6)
    assert "weight_ensemble" in result.figures["trajectories"]  # folders tell two runs of a method apart


def test_training_before_a_merge_is_drawn_where_it_led(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[dict[str, torch.Tensor]] = []  # θ_t of the run itself, as it comes to the merge
    merge = CoFiMA.merge

    def spy(self: CoFiMA, *args: Any) -> None:
        trained.append(snapshot(self.net.backbone))
        merge(self, *args)

    monkeypatch.setattr(CoFiMA, "merge", spy)
    folder = kept("cofima", seed=7)
    monkeypatch.undo()
    run = open_run(folder)
    states = [run.backbone(t) for t in range(4)]
    flat = principal(states)
    rows = trajectories([folder], grid=0).rows
    assert [row["trained_x"] == "" for row in rows] == [True, True, False, False]
    for t, network in zip((2, 3), trained, strict=True):
        where = flat.coordinates({key: network[key] for key in run.parameters})[:2]
        assert (rows[t]["trained_x"], rows[t]["trained_y"]) == pytest.approx(where)
        before, after = np.array([flat.coordinates(states[s])[:2] for s in (t - 1, t)])
        divided = before + (after - before) / run.history[t - 1].lam  # true of CoMA only
        assert np.linalg.norm(divided - where) > 0.1 * np.linalg.norm(np.array(where) - before)


def test_trained_weights_need_not_be_drawn(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cofima.analysis.trajectories.relearn", None)  # nothing is learned again
    rows = trajectories([kept("coma")], grid=0, trained=False).rows
    assert {row["trained_x"] for row in rows} == {""}
    assert len(trajectories([kept("slca")], grid=0).rows) == 4  # nothing is merged there


def test_class_means_are_the_nearest_by_cosine(folders: list[Path]) -> None:
    run = open_run(folders[0])
    context, stream = load_tasks(run, SILENT)
    net = build_empty(run.facts.name, run.facts.size)
    net.load_state_dict(run.start)
    net.eval()
    right = total = 0
    with torch.no_grad():
        means = []
        for label in range(6):
            task = stream[label // 2]
            pixels, _ = task.train.batch((task.train.labels == label).nonzero()[:, 0])
            means.append(torch.nn.functional.normalize(net(context.view.test(pixels))).mean(0))
        for task in stream:
            pixels, labels = task.test.batch(torch.arange(len(task.test)))
            for feature, label in zip(net(context.view.test(pixels)), labels, strict=True):
                cosines = [torch.cosine_similarity(feature, mean, dim=0) for mean in means]
                right += int(torch.stack(cosines).argmax()) == int(label)
                total += 1
    assert class_means(net, stream, context, None) == pytest.approx(100 * right / total)


def test_runs_that_cannot_share_a_plane_are_refused(folders: list[Path], kept: Any) -> None:
    with pytest.raises(CofimaError) as caught:
        trajectories([folders[0], kept("coma", "resnet_test"), kept("coma", seed=4)], grid=0)
    assert "began at other weights" in str(caught.value)
    assert "learned other tasks" in str(caught.value)
    norms = [kept("coma", "resnet_test"), kept("slca", "resnet_test")]
    assert len(trajectories(norms, grid=0).rows) == 8
    with pytest.raises(CofimaError, match=r"batch normalization.*--grid 0"):
        trajectories(norms, grid=5)
