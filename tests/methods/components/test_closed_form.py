"""Heads in closed form: what predicts is solved from what is kept, after every task."""

from typing import Any

import pytest
import torch

from cofima import methods
from cofima.core.errors import CofimaError
from cofima.core.seeds import Seeds
from cofima.experiment.config import check
from cofima.methods.components.closed_form import ClosedFormOptions, RidgeReadout
from cofima.methods.components.discriminant import discriminant
from cofima.methods.components.projection import ProjectedHead

FAMILY = ("slca", "coma", "cofima", "wise_ft", "ema", "weight_ensemble")


@pytest.mark.parametrize("name", FAMILY)
def test_the_discriminant_predicts_after_every_task(name: str, tiny: Any) -> None:
    stream = tiny.stream((2, 1, 2), per_class=6)
    how = {"classifier": "lda", "closed_form": {"priors": "counts"}}
    method = tiny.model(tiny.config(name, train={"epochs": 1}, options=how), stream).method
    for task in stream:
        method.learn(task)
        weight, bias = discriminant(method.gaussians, "counts")
        torch.testing.assert_close(method.head().flat()["weight"], weight.float())
        torch.testing.assert_close(method.head().flat()["bias"], bias.float())
        assert method.head() is not method.net.head
        assert any(note.startswith("shrinkage ") for note in method.facts["notes"])
        assert "align" not in method.facts["seconds"]
    assert method.gaussians.counts == [6] * 5


@pytest.mark.parametrize(
    ("given", "said"), [(0.3, "shrinkage 0.3"), ("oas", "computed"), ("loo", "left out")]
)
def test_the_shrinkage_is_given_computed_or_chosen(given: Any, said: str, tiny: Any) -> None:
    stream = tiny.stream((2,), per_class=6)
    how = {"classifier": "lda", "closed_form": {"shrinkage": given}}
    method = tiny.model(tiny.config("slca", train={"epochs": 1}, options=how), stream).method
    method.learn(stream[0])
    assert 0 < method.gaussians.shrinkage <= 1
    assert given != 0.3 or method.gaussians.shrinkage == 0.3
    assert any(said in note for note in method.facts["notes"])


def test_the_regression_predicts_with_the_sums_of_all_images(tiny: Any) -> None:
    stream = tiny.stream((2, 2), per_class=6)
    how = {"classifier": "ridge", "closed_form": {"projection": 20, "ridge": 3.0}}
    method = tiny.model(tiny.config("slca", train={"epochs": 1}, options=how), stream).method
    hidden, targets = [], []
    for task in stream:
        method.learn(task)
        head = method.head()
        assert isinstance(head, ProjectedHead)
        hidden.append(head.hidden(method.features(task.train).double()))
        targets.append(torch.nn.functional.one_hot(task.train.labels, 4).double())
        h, y = torch.cat(hidden), torch.cat(targets)
        slow = torch.linalg.solve(h.T @ h + 3.0 * torch.eye(20, dtype=torch.float64), h.T @ y)
        rows = task.classes.stop
        torch.testing.assert_close(head.flat()["weight"].double(), slow.T[:rows], rtol=1e-4, atol=1e-6)


def test_another_projection_is_refused() -> None:
    how = ClosedFormOptions(projection=8)
    state = RidgeReadout(4, how, Seeds(1)).state()
    with pytest.raises(CofimaError, match="another random projection"):
        RidgeReadout(4, how, Seeds(2)).restore(state)


@pytest.mark.parametrize("classifier", ["lda", "ridge"])
@pytest.mark.parametrize("other", [{"alignment": "end"}, {"align": {"epochs": 0}}])
def test_what_is_for_the_alignment_alone_is_refused(classifier: str, other: dict[str, Any]) -> None:
    with pytest.raises(CofimaError, match=f"classifier={classifier}: the head is solved after every task"):
        check({"method": "coma", "options": {"classifier": classifier} | other})


def test_the_key_of_a_first_task_tells_heads_apart() -> None:
    keys = [
        methods.first_task_key(methods.build("slca", options))
        for options in (
            {},
            {"classifier": "lda"},
            {"classifier": "ridge"},
            {"classifier": "lda", "closed_form": {"priors": "counts"}},
            {"classifier": "lda", "closed_form": {"shrinkage": 0.5}},
        )
    ]
    assert all(keys.count(key) == 1 for key in keys)
