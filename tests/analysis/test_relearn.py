"""A re-run task gives the weights of the run, bit for bit, also if merged again with the run's share."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cofima.analysis.relearn import relearn
from cofima.analysis.run_folder import choose_task, open_run
from cofima.analysis.share import merge_and_measure, posthoc
from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT, Progress
from cofima.store import model_folder
from cofima.store.generation import Generation
from cofima.weights import average, fisher_average, weight_distance

MERGING = {
    "coma": {},
    "cofima": {},
    "wise_ft": {},
    "coma auto": {"lam": "auto"},
    "cofima auto": {"lam": "auto"},
    "cofima accumulate": {"fisher_history": "accumulate"},
    "cofima authors": {"variant": "authors"},
}


class Listener(Progress):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def say(self, message: str) -> None:
        self.heard.append(message)


@pytest.mark.parametrize(
    ("name", "network"),
    [*((name, "vit_test") for name in MERGING), ("coma", "resnet_test"), ("cofima", "resnet_test")],
)
def test_merged_again_at_its_own_share_is_the_run_bit_for_bit(
    name: str, network: str, kept: Any, same_bits: Any
) -> None:
    run = open_run(kept(name.split()[0], network, options=MERGING[name]))
    listener = Listener()
    task = relearn(run, 3, listener)
    assert not [line for line in listener.heard if "gave other weights" in line]
    assert task.lam == run.history[-1].lam
    again = task.merge_again(task.lam)
    same_bits(again.weights(), model_folder.read(run.folder, run.folder / "0003").weights())
    measured = merge_and_measure(task, task.lam)
    assert measured.accuracy == run.history[-1].accuracy


def test_a_middle_task_is_relearned_too(kept: Any, same_bits: Any) -> None:
    run = open_run(kept("cofima"))
    task = relearn(run, 2, SILENT)
    same_bits(
        task.merge_again(task.lam).weights(), model_folder.read(run.folder, run.folder / "0002").weights()
    )
    assert len(task.seen) == 2


def test_the_merge_is_the_paper_s_of_what_was_handed_over(kept: Any, same_bits: Any) -> None:
    coma, cofima = (relearn(open_run(kept(method)), 3, SILENT) for method in ("coma", "cofima"))
    same_bits(coma.merged, average(coma.old, coma.trained, coma.lam))
    expected = fisher_average(cofima.old, cofima.trained, cofima.fisher_old, cofima.fisher_new, cofima.lam)
    same_bits(cofima.merged, expected)
    assert not coma.fisher_new


def test_coma_moves_its_share_of_the_way(kept: Any) -> None:
    run = open_run(kept("coma"))
    task = relearn(run, 3, SILENT)
    names = [f"backbone.{name}" for name in run.parameters]
    old, trained, merged = ({k: w[k] for k in names} for w in (task.old, task.trained, task.merged))
    raw, kept_way = weight_distance(old, trained), weight_distance(old, merged)
    assert raw > 0
    assert kept_way == pytest.approx(task.lam * raw, rel=1e-4)
    said = run.history[-1].distance
    assert (said.trained, said.merged) == pytest.approx((raw, kept_way), rel=1e-9)


def test_the_ends_of_the_sweep_are_the_ends_of_the_task(kept: Any) -> None:
    task = relearn(open_run(kept("cofima")), 3, SILENT)
    none, all_ = (task.merge_again(lam).method.net.state_dict() for lam in (0.0, 1.0))
    assert all(torch.equal(none[key], value) for key, value in task.old.items())
    assert all(torch.equal(all_[key], value) for key, value in task.trained.items())


def test_the_sweep_learns_nothing_and_spoils_nothing(kept: Any) -> None:
    task = relearn(open_run(kept("cofima")), 3, SILENT)
    before = {key: value.clone() for key, value in task.before.weights().items()}
    first = merge_and_measure(task, 0.7)
    assert merge_and_measure(task, 0.1) != first
    assert merge_and_measure(task, 0.7) == first
    assert all(torch.equal(before[key], value) for key, value in task.before.weights().items())


def test_the_sweep_has_a_row_for_each_share_and_one_for_the_run(kept: Any, tmp_path: Path) -> None:
    folder = kept("coma")
    result = posthoc(folder, [0.0, 1.0])
    assert [row["lam"] for row in result.rows] == [0.0, 0.4, 1.0]
    own = result.rows[1]
    row = open_run(folder).history[-1]
    mean = sum(a * n for a, n in zip(row.accuracy, row.sizes, strict=True)) / sum(row.sizes)
    assert own["of_run"]
    assert own["accuracy_all"] == mean
    assert "do not choose λ by them" in result.summary[-1]
    files = result.write(tmp_path)
    assert [file.name for file in files] == ["lambda_posthoc.csv", "lambda_posthoc.svg"]


def test_an_analysis_leaves_the_run_as_it_is(kept: Any) -> None:
    folder = kept("cofima")

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    before = files()
    relearn(open_run(folder), 3, SILENT).merge_again(0.9)
    assert files() == before


def test_a_run_that_comes_out_otherwise_is_said(kept: Any, monkeypatch: Any) -> None:
    run, read = open_run(kept("coma")), Generation.weights

    def weights(self: Generation) -> dict[str, Tensor]:
        return {key: value + (self.name == "0003") for key, value in read(self).items()}

    monkeypatch.setattr(Generation, "weights", weights)
    listener = Listener()
    relearn(run, 3, listener)
    assert any("gave other weights" in line for line in listener.heard)


def test_what_a_run_lacks_is_said(kept: Any, tmp_path: Path) -> None:
    with pytest.raises(CofimaError, match="not a model folder: there is no such folder"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(CofimaError, match="has learned one task only"):
        open_run(kept("joint"))
    run = open_run(kept("coma"))
    with pytest.raises(CofimaError, match=r"--task 4: .* can show tasks 2 to 3"):
        choose_task(run, 4)
    pruned = tmp_path / "pruned"
    shutil.copytree(run.folder, pruned)
    shutil.rmtree(pruned / "0001")
    assert relearn(open_run(pruned), 3, SILENT).trained  # the last task needs the last two states only
    with pytest.raises(
        CofimaError, match=r"does not keep its state after task 1 of 3.*keep_checkpoints=true"
    ):
        relearn(open_run(pruned), 2, SILENT)
    with pytest.raises(CofimaError, match=r"run of SLCA, which does not average weights.*coma, .*wise_ft"):
        posthoc(kept("slca"), [0.5])
