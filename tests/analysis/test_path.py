"""Interpolation path and landscape: networks at every point are correct, and exact at the ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from cofima.analysis.evaluate_at import Evaluator, fewer, measure, spread
from cofima.analysis.landscape import axis, landscape, span, survey
from cofima.analysis.path import MeasuredPath, measure_path, path
from cofima.analysis.relearn import Relearned, relearn
from cofima.analysis.run_folder import open_run
from cofima.analysis.share import merge_and_measure
from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT
from cofima.methods.components.batchnorm import refresh_batchnorm
from cofima.models.backbone import build_empty
from cofima.models.net import Net
from cofima.training.loop import plain_batches
from cofima.weights import Weights, weight_distance


def slowly(task: Relearned, state: Weights, *, fresh_norms: bool = False) -> tuple[list[float], list[float]]:
    """Return accuracy and loss on each task of a network put together by hand."""
    facts, context = task.run.facts, task.before.method.context
    net = Net(build_empty(facts.name, facts.size), facts.features, [2] * len(task.seen)).eval()
    net.load_state_dict(state)
    if fresh_norms:
        refresh_batchnorm(net, plain_batches(task.task.train, context, ""))
    right, losses = [], []
    for one in task.seen:
        with torch.no_grad():
            logits = torch.cat([net(x) for x, _ in plain_batches(one.test, context, "")])
        right.append(100 * float((logits.argmax(1) == one.test.labels).double().mean()))
        losses.append(float(cross_entropy(logits, one.test.labels)))
    return right, losses


@pytest.fixture(scope="module", params=["vit_test", "resnet_test"])
def task(request: pytest.FixtureRequest, kept: Any) -> Relearned:
    return relearn(open_run(kept("cofima", request.param)), 3, SILENT)


def test_the_ends_of_the_path_are_the_two_networks_exactly(task: Relearned) -> None:
    line = measure_path(task, Evaluator(task), [0.0, 0.5, 1.0], SILENT)
    for point, state in zip((line.measures[0], line.measures[-1]), ({}, task.trained), strict=True):
        right, losses = slowly(task, task.trained | (state or task.old))
        assert point.accuracy == right
        assert point.loss == pytest.approx(losses, rel=1e-5)
    middle = {k: torch.lerp(task.old[k], v, 0.5) if k in task.old and v.is_floating_point() else v
              for k, v in task.trained.items()}  # fmt: skip
    norms = task.run.facts.name.startswith("resnet")
    right, losses = slowly(task, middle, fresh_norms=norms)
    assert line.measures[1].accuracy == right
    assert line.measures[1].loss == pytest.approx(losses, rel=1e-5)


def test_aligned_the_path_of_coma_is_its_sweep(kept: Any) -> None:
    task = relearn(open_run(kept("coma", "resnet_test")), 3, SILENT)
    shares = [0.0, task.lam, 1.0]
    line = measure_path(task, Evaluator(task, "aligned"), shares, SILENT)
    assert [m.accuracy for m in line.measures] == [merge_and_measure(task, lam).accuracy for lam in shares]
    assert line.measures[1].accuracy == task.run.history[-1].accuracy


def test_the_barrier_is_the_highest_rise_above_the_straight_line(task: Relearned) -> None:
    line = measure_path(task, Evaluator(task, images=4), [0.0, 0.25, 0.5, 1.0], SILENT)
    losses = [m.mean("loss", "all") for m in line.measures]
    above = [losses[k] - (losses[0] + a * (losses[-1] - losses[0])) for k, a in enumerate(line.shares)]
    assert line.barrier("all") == pytest.approx(max(above))
    assert line.barrier("all") >= 0
    assert MeasuredPath([0, 1], [line.measures[0], line.measures[-1]]).barrier("old") == 0


def test_parts_are_means_over_images(task: Relearned) -> None:
    found = measure(Evaluator(task).net, task.seen, task.before.method.context)
    sizes, right = found.sizes, found.accuracy
    assert found.mean("accuracy", "new") == pytest.approx(right[-1])
    assert found.mean("accuracy", "old") == pytest.approx(
        sum(a * n for a, n in zip(right[:-1], sizes[:-1], strict=True)) / sum(sizes[:-1])
    )


def test_fewer_images_are_spread_over_all(task: Relearned) -> None:
    few = fewer(task.seen, 5)
    assert [len(one.test) for one in few] == [5, 5, 5]
    whole = task.task.test
    assert spread(whole, 5).rows.tolist() == whole.rows[[0, 4, 8, 12, 16]].tolist()
    assert spread(whole, 1000) is whole
    assert fewer(task.seen, None) is task.seen


def test_the_grid_has_the_three_networks_with_what_they_reach(task: Relearned) -> None:
    flat, corners = span(task)
    places = survey(Evaluator(task), task, flat, corners, 5, SILENT)
    assert len(places) == 25
    named = {place.name: place for place in places if place.name}
    assert named.keys() == {"θ_0", "θ*_2", "θ_3"}
    start = {f"backbone.{key}": value for key, value in task.run.start.items()}
    networks = {"θ_0": task.trained | start, "θ*_2": task.trained | task.old, "θ_3": task.trained}
    for name, state in networks.items():
        assert named[name].found.accuracy == slowly(task, state)[0]
    by_place = {(p.x, p.y): p.found.accuracy for p in places}
    assert len({x for x, _ in by_place}) == len({y for _, y in by_place}) == 5


def test_coma_merges_in_the_plane_and_cofima_beside_it(kept: Any, task: Relearned) -> None:
    coma = relearn(open_run(kept("coma")), 3, SILENT)
    old, trained, _, merged = span(coma)[1]
    assert merged.x == pytest.approx(coma.lam * trained.x, rel=1e-4)
    assert merged.y == pytest.approx(old.y, abs=1e-4 * trained.x)
    size = weight_distance(merged.weights, {key: 0 * value for key, value in merged.weights.items()})
    assert merged.away == pytest.approx(0, abs=1e-7 * size)  # what single precision leaves
    assert span(task)[1][-1].away > 0.01 * span(task)[1][1].x


def test_a_grid_s_axis_has_the_values_and_its_number_of_places() -> None:
    assert axis([0.0, 1.0], 5) == pytest.approx([-0.25, 0.0, 0.5, 1.0, 1.25])
    places = axis([0.0, 0.01, 4.0], 7)
    assert {0.0, 0.01, 4.0} <= set(places)
    assert len(set(places)) == 7
    assert places == sorted(places)


def test_the_commands_functions_give_rows_and_figures(kept: Any, tmp_path: Path) -> None:
    folder = kept("cofima")
    line = path(folder, points=3, images=3)
    assert [row["share"] for row in line.rows] == [0.0, 0.5, 1.0]
    assert line.rows[0]["lam_of_run"] == 0.4
    plane = landscape(folder, task=2, grid=5, images=2)
    assert len(plane.rows) == 26
    assert plane.rows[-1]["network"] == "θ*_2"
    for result in (line, plane):
        for file in result.write(tmp_path):
            assert file.read_text("utf-8").startswith(("<svg", "run,"))


def test_methods_without_such_a_path_are_refused(kept: Any) -> None:
    with pytest.raises(CofimaError, match=r"run of ewc.*this analysis is for: .*slca"):
        path(kept("ewc"))
    with pytest.raises(CofimaError, match="--head aligned: Seq FT does not align"):
        path(kept("seq_ft"), head="aligned", images=1)
