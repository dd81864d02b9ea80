"""Fisher diagnostics against their definitions, weight by weight."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cofima.analysis.fisher import describe, fisher
from cofima.analysis.relearn import Relearned, relearn
from cofima.analysis.run_folder import open_run
from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT


@pytest.fixture(scope="module")
def task(kept: Any) -> Relearned:
    return relearn(open_run(kept("cofima")), 3, SILENT)


def test_equal_fishers_give_every_weight_the_share_lam(task: Relearned) -> None:
    same = replace(task, fisher_old=task.fisher_new)
    for layer in describe(same):
        assert layer.share_mean == pytest.approx(task.lam, abs=1e-12)
        assert layer.histogram[int(task.lam * 20)] == layer.weights
        assert (layer.near_old, layer.near_new) == (0, 0)
        assert layer.overlap == pytest.approx(1) or layer.mean_new == 0


def test_numbers_are_their_definitions_weight_by_weight(task: Relearned) -> None:
    every, *layers = describe(task)
    both = [key for key in task.fisher_new if key in task.fisher_old]
    assert any(key.startswith("head.") for key in both)
    pairs = [
        (old, new)
        for key in both
        for old, new in zip(
            task.fisher_old[key].flatten().tolist(), task.fisher_new[key].flatten().tolist(), strict=True
        )
    ]
    lam = task.lam
    shares = [lam * n / (lam * n + (1 - lam) * o) if n or o else lam for o, n in pairs]
    assert every.weights == len(pairs) == sum(layer.weights for layer in layers)
    assert every.share_mean == pytest.approx(sum(shares) / len(shares))
    assert every.near_old == pytest.approx(sum(s < 0.05 for s in shares) / len(shares))
    assert every.near_new == pytest.approx(sum(s > 0.95 for s in shares) / len(shares))
    assert every.zero_old == pytest.approx(sum(o == 0 for o, _ in pairs) / len(pairs))
    sums = sum(o for o, _ in pairs), sum(n for _, n in pairs)
    overlap = sum(((o / sums[0]) * (n / sums[1])) ** 0.5 for o, n in pairs)
    assert every.overlap == pytest.approx(overlap)
    assert sum(every.histogram) == every.weights


def test_nothing_in_common_is_no_overlap(task: Relearned) -> None:
    keys = list(task.fisher_old)
    old = {k: torch.ones_like(v) * (i % 2) for i, (k, v) in enumerate(task.fisher_old.items())}
    new = {k: torch.ones_like(task.fisher_old[k]) * (1 - i % 2) for i, k in enumerate(keys)}
    every = describe(replace(task, fisher_old=old, fisher_new=new))[0]
    assert every.overlap == 0
    assert every.near_old + every.near_new == 1


def test_the_command_s_function_and_whom_it_is_for(kept: Any) -> None:
    result = fisher(kept("cofima"))
    assert result.rows[0]["layer"] == "all"
    assert {"blocks.0", "blocks.1", "patch_embed"} <= {row["layer"] for row in result.rows}
    assert result.figures.keys() == {"fisher", "fisher_shares"}
    assert fisher(kept("coma", options={"lam": "auto"})).rows[0]["zero_new"] < 1
    with pytest.raises(CofimaError, match=r"run of CoMA, which .* does not average by Fisher.*cofima"):
        fisher(kept("coma"))
    with pytest.raises(CofimaError, match=r"run of EWC, which .* does not average by Fisher"):
        fisher(kept("ewc"))
