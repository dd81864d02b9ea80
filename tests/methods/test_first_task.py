"""First tasks that cells may share: what is said to be the same is the same, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cofima import methods
from cofima.core.errors import CofimaError
from cofima.experiment.grid import shared_first_task
from cofima.experiment.launch import launch
from cofima.methods import first_task_key
from cofima.methods.slca import SLCA
from cofima.store import model_folder
from cofima.store.record import BACKBONE

NORM = {"norm": "mean"}
# settings with one and the same first task; the first of each learns it, all others take it over
SAME: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "slow": [
        ("slca", {}),
        ("slca", {"align": {"epochs": 1, "samples_per_class": 8}, "alignment": "end"}),
        ("coma", {"lam": 0.2}),
        ("coma", {"lam": 1.0, "statistics": "trained", "weight": "tasks", "fisher": NORM}),
        ("weight_ensemble", {"init": "previous"}),
    ],
    "symmetric": [("slca_pp", {}), ("slca_pp", {"align": {"epochs": 1}, "alignment": "end"})],
    "fisher": [("cofima", {"lam": 0.1}), ("cofima", {"lam": 0.9, "weight": "samples"})],
    "authors": [
        ("cofima", {"variant": "authors", "lam": 0.3}),
        ("cofima", {"variant": "authors", "lam": 0.5, "fisher": NORM}),
    ],
    "summed": [
        ("coma", {"lam": "auto"}),
        ("cofima", {"lam": "auto", "fallback": 0.1}),
        ("cofima", {"lam": 0.3, "fisher_history": "accumulate"}),
    ],
    "wise_ft": [
        ("wise_ft", {"lam": 0.3, "merge_first": False}),
        ("wise_ft", {"lam": 0.8, "merge_first": False}),
    ],
    "merged first": [("wise_ft", {"lam": 0.3}), ("wise_ft", {"lam": 0.3, "alignment": "end"})],
    "magmax": [("magmax", {"lam": 0.3}), ("magmax", {"lam": 0.3, "alignment": "end"})],
    "opcm": [("opcm", {"alpha": 0.3}), ("opcm", {"alpha": 0.8, "alignment": "end"})],
    "pm": [("pm", {"epsilon": 0.3}), ("pm", {"epsilon": 0.3, "alignment": "end"})],
    "ensemble": [("weight_ensemble", {}), ("weight_ensemble", {"alignment": "end"})],
    "ema": [("ema", {"decay": 0.5}), ("ema", {"decay": 0.5, "form": "as_printed"})],
    "ewc": [("ewc", {"lamb": 0.1}), ("ewc", {"lamb": 5.0, "gamma": 0.5})],
    "lwf": [("lwf", {"lamb": 0.0}), ("lwf", {"lamb": 2.0, "temperature": 1.0})],
}


def config_of(tiny: Any, method: str, options: dict[str, Any], network: str = "vit_test") -> Any:
    short = {
        "stream": {"base_classes": 2, "increment": 2},
        "train": {"epochs": 1},
        "data": {"max_train_per_class": 6, "max_test_per_class": 4},
    }
    return tiny.config(method, network, options=options, **short)


@pytest.mark.parametrize(
    ("group", "network"),
    [
        *((group, "vit_test") for group in SAME),
        *((group, "resnet_test") for group in ("slow", "fisher", "ema")),  # with what batch norm keeps
    ],
)
def test_a_first_task_that_is_taken_over_is_the_one_that_would_have_been_learned(
    group: str, network: str, tmp_path: Path, tiny: Any, same_bits: Callable[..., None]
) -> None:
    configs = [config_of(tiny, *setting, network) for setting in SAME[group]]
    assert len({shared_first_task.key(config) for config in configs}) == 1
    launch(configs[0], tmp_path / "first", tasks=1)
    for number, config in enumerate(configs[1:]):
        alone, taken = tmp_path / f"alone {number}", tmp_path / f"taken {number}"
        launch(config, alone, tasks=1)
        assert shared_first_task.take(tmp_path / "first", config, taken)
        mine, theirs = model_folder.read(taken), model_folder.read(alone)
        same_bits(mine.weights() | mine.state(), theirs.weights() | theirs.state())
        assert said(taken) == said(alone)


def said(folder: Path) -> list[Any]:
    """Return what a folder says of itself, but for times, memory and where its first task is from."""
    kept = json.loads((folder / "0001" / "config.json").read_text())
    (row,) = model_folder.read_history(folder)
    gone = {"date", "seconds", "peak_memory_mb", "notes"}
    return [
        {key: value for key, value in kept.items() if key not in ("files", "sha256")},
        row.model_dump(exclude=gone),
        [note for note in row.notes if note != shared_first_task.NOTE],
    ]


def test_a_cell_that_took_its_first_task_over_ends_like_one_that_learned_it(
    tmp_path: Path, tiny: Any, same_bits: Callable[..., None]
) -> None:
    lead, other = (config_of(tiny, "cofima", {"lam": lam}) for lam in (0.2, 0.7))
    launch(lead, tmp_path / "first", tasks=1)
    assert shared_first_task.take(tmp_path / "first", other, tmp_path / "taken")
    whole, taken = launch(other, tmp_path / "whole"), launch(other, tmp_path / "taken")
    same_bits(taken.weights(), whole.weights())
    same_bits(taken.method.state(), whole.method.state())
    assert [row.accuracy for row in taken.history] == [row.accuracy for row in whole.history]
    assert shared_first_task.NOTE in taken.history[0].notes
    assert not shared_first_task.take(
        tmp_path / "first", other, tmp_path / "taken"
    )  # it has begun: it is left alone


@pytest.mark.parametrize(
    ("method", "one", "two"),
    [
        ("coma", {"lam": 0.4}, {"lam": "auto"}),
        ("cofima", {}, {"variant": "authors"}),
        ("cofima", {}, {"fisher": NORM}),
        ("cofima", {"lam": "auto"}, {"lam": "auto", "weight": "samples"}),
        ("wise_ft", {"lam": 0.2}, {"lam": 0.3}),
        ("weight_ensemble", {}, {"init": "previous"}),
        ("ema", {"decay": 0.5}, {"decay": 0.6}),
        ("ewc", {}, {"form": "separate"}),
        ("slca", {}, {"align": {"shrink": False}}),
        ("cofima", {}, {"align": {"shrink": False}}),
    ],
)
def test_options_that_decide_the_first_task_keep_cells_apart(
    method: str, one: dict[str, Any], two: dict[str, Any], tiny: Any
) -> None:
    assert shared_first_task.key(config_of(tiny, method, one)) != shared_first_task.key(
        config_of(tiny, method, two)
    )


@pytest.mark.parametrize(
    "change", ["seed", "train.epochs", "data.max_train_per_class", "stream.increment", "val_fraction"]
)
def test_everything_else_keeps_cells_apart_too(change: str, tiny: Any) -> None:
    plain = config_of(tiny, "coma", {})
    values = plain.model_dump(mode="json")
    *parents, last = change.split(".")
    place = values[parents[0]] if parents else values
    place[last] = 0.5 if last == "val_fraction" else 4
    from cofima.experiment.config import check

    assert shared_first_task.key(check(values)) not in (shared_first_task.key(plain), None)


def test_a_method_that_says_nothing_shares_nothing() -> None:
    shared = {setting[0] for group in SAME.values() for setting in group}
    for name in set(methods.names()) - shared:
        assert first_task_key(methods.build(name)) is None, name

    class Derived(SLCA):
        pass

    assert first_task_key(Derived()) is None
    assert Derived().first_task_key() is not None  # what SLCA says of itself is not believed of another


def test_a_damaged_first_task_is_refused(tmp_path: Path, tiny: Any) -> None:
    config = config_of(tiny, "slca", {})
    launch(config, tmp_path / "first", tasks=1)
    with model_folder.read(tmp_path / "first").place(BACKBONE).open("ab") as file:
        file.write(b"more")
    with pytest.raises(CofimaError, match="sha256 differs"):
        shared_first_task.take(tmp_path / "first", config, tmp_path / "taken")
    assert model_folder.current(tmp_path / "taken") is None
