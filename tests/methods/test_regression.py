"""Accuracies and norms of a small run of every method and variant, as an earlier commit recorded them.

A change that is meant to move numbers records its own with ``pytest tests --renew -k regression`` and says
so in CHANGELOG.md under "Numbers changed". The runs compute in double precision: where training amplifies how
a machine rounds, as with batch normalization, single precision would differ between machines by percents.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cofima import methods
from cofima.data.transforms import View
from cofima.store.model import Model
from cofima.training.evaluate import Score

# Cases by name: method, options, network and sizes of the tasks where they are not the usual ones.
CASES: dict[str, dict[str, Any]] = {name: {"method": name} for name in methods.names()}
CASES |= {
    "slca, aligned at the end": {"method": "slca", "options": {"alignment": "end"}},
    "coma, lam auto": {"method": "coma", "options": {"lam": "auto"}},
    "coma, statistics of the trained network": {"method": "coma", "options": {"statistics": "trained"}},
    "cofima, lam auto": {"method": "cofima", "options": {"lam": "auto"}},
    "cofima, authors": {"method": "cofima", "options": {"variant": "authors"}},
    "cofima, accumulated": {
        "method": "cofima",
        "options": {"fisher_history": "accumulate", "weight": "samples"},
    },
    "cofima, equal steps": {"method": "cofima", "options": {"fisher": {"share": "equal"}}},
    "cofima, sampled labels": {
        "method": "cofima",
        "options": {"fisher": {"labels": "sampled", "logits": "local", "norm": "mean", "clip": 1.0}},
    },
    "ema, as printed": {"method": "ema", "options": {"form": "as_printed", "decay": 0.9}},
    "weight_ensemble, from the previous": {"method": "weight_ensemble", "options": {"init": "previous"}},
    "wise_ft, not the first task": {"method": "wise_ft", "options": {"merge_first": False}},
    "ewc, separate": {"method": "ewc", "options": {"form": "separate"}},
    "bic, random memory": {"method": "bic", "options": {"selection": "random"}},
    "ranpac, ssf": {"method": "ranpac", "options": {"petl": "ssf", "adapt": {"epochs": 1}}},
    "ranpac, vpt": {"method": "ranpac", "options": {"petl": "vpt", "ridge": 10.0, "adapt": {"epochs": 1}}},
    "ranpac, none": {"method": "ranpac", "options": {"petl": "none"}},
    "l2p, vote": {"method": "l2p", "options": {"vote": True}},
    "cofima, lora": {"method": "cofima", "train": {"lora": {"rank": 2}}},
    "cofima, lora in attention": {"method": "cofima", "train": {"lora": {"rank": 2, "layers": "attention"}}},
    "ema, lora, batch norm": {"method": "ema", "train": {"lora": {"rank": 2}}, "network": "resnet_test"},
    "cofima, balanced": {"method": "cofima", "train": {"balance": 0.5, "schedule": "cosine"}},
}
CASES |= {
    "coma, lda": {"method": "coma", "options": {"classifier": "lda"}},
    "coma, lda and drift": {"method": "coma", "options": {"classifier": "lda", "drift": "linear"}},
    "coma, power": {
        "method": "coma",
        "options": {"classifier": "lda", "drift": "linear", "closed_form": {"features": "power"}},
    },
    "cofima, drift": {"method": "cofima", "options": {"drift": "linear"}},
    "coma, ridge": {
        "method": "coma",
        "options": {"classifier": "ridge", "closed_form": {"projection": 64, "ridge": 1.0}},
    },
}
CASES |= {
    f"{name}, one class a task": {"method": name, "groups": (3, 1, 1)}
    for name in ("seq_ft", "slca", "cofima", "der_pp")
}
CASES |= {
    f"{name}, batch norm": {"method": name, "network": "resnet_test"}
    for name in (
        *("seq_ft", "slca", "coma", "cofima", "ema", "wise_ft", "weight_ensemble", "lwf", "bic"),
        *("magmax", "opcm", "pm", "fecam"),
    )
}


def learned(tiny: Any, method: str, **how: Any) -> tuple[Model, list[Score]]:
    """Learn three tasks as a case says, and score after each; nothing is written, which changes no bit."""
    stream = tiny.stream(how.pop("groups", (2, 2, 2)), per_class=12)
    train = {"epochs": 4} | how.pop("train", {})
    model = tiny.model(tiny.config(method, how.pop("network", "vit_test"), train=train, **how), stream)
    tasks, scores = model.method.stream(stream), []
    for task in tasks:
        model.method.learn(task)
        scores.append(model.method.score(tasks[: task.index + 1]))
    return model, scores


def numbers(model: Model, scores: list[Score]) -> dict[str, Any]:
    """Return what is recorded of a run: accuracies after each task, and the norm of every tensor."""

    def norms(tensors: dict[str, Any]) -> dict[str, float]:
        return {key: float(f"{value.double().norm():.6g}") for key, value in sorted(tensors.items())}

    return {
        "accuracy": [score.accuracy for score in scores],
        "sizes": [score.sizes for score in scores],
        "weights": norms(model.weights()),
        "state": norms(model.method.state()),
    }


@pytest.fixture
def _double_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute all in float64, also where single precision is asked for."""
    single = View._normalized
    monkeypatch.setattr(View, "_normalized", lambda self, images: single(self, images).double())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("_double_precision")
@pytest.mark.filterwarnings("ignore::cofima.core.errors.CofimaWarning")
def test_numbers_are_those_recorded(name: str, tiny: Any, recorded: Any) -> None:
    found = numbers(*learned(tiny, **copy.deepcopy(CASES[name])))
    known = recorded("runs", name, found)
    assert found["sizes"] == known["sizes"]
    for now, before, sizes in zip(found["accuracy"], known["accuracy"], known["sizes"], strict=True):
        for one, other, size in zip(now, before, sizes, strict=True):
            assert one == pytest.approx(other, abs=100.5 / size)  # one image, as another machine may round
    for part in ("weights", "state"):
        assert found[part] == pytest.approx(known[part], rel=1e-5, abs=1e-8), part


def test_every_method_is_recorded_and_no_other_case(recorded: Any) -> None:
    assert {case["method"] for case in CASES.values()} == set(methods.names())
    assert recorded.names("runs") == set(CASES)
