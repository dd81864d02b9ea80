"""Configurations: every mistake in one message, each with a hint, before anything is done."""

import json
from pathlib import Path
from typing import Any

import pytest

from cofima.core.errors import CofimaError, did_you_mean, problems
from cofima.experiment import config
from cofima.experiment.config import check, difference, read
from cofima.store.config import Config


def said(values: dict[str, Any]) -> str:
    with pytest.raises(CofimaError) as caught:
        check(values)
    return str(caught.value)


def written(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_nothing_given_is_a_whole_configuration() -> None:
    made = check({})
    assert (made.method, made.dataset, made.backbone) == ("cofima", "digits", "vit_micro")
    assert made.options["lam"] == 0.4
    assert made.options["align"]["epochs"] == 5


def test_all_problems_are_listed_at_once_with_hints() -> None:
    text = said(
        {
            "method": "cofma",
            "dataset": "digts",
            "backbone": "vit_mirco",
            "sed": 1,
            "seed": -4,
            "train": {"epoch": 3, "lr": -1, "batch_size": "many"},
            "stream": {"base_clases": 2},
        }
    )
    assert "9 problems" in text
    for part in (
        "did you mean 'cofima'?",
        "did you mean 'digits'?",
        "did you mean 'vit_micro'?",
        "sed = 1: unknown key; did you mean 'seed'?",
        "seed = -4",
        "train.epoch = 3: unknown key; did you mean 'train.epochs'?",
        "train.lr = -1",
        "train.batch_size = many",
        "stream.base_clases = 2: unknown key; did you mean 'stream.base_classes'?",
    ):
        assert part in text, part


def test_options_of_a_method_are_checked_with_the_rest() -> None:
    text = said({"method": "coma", "options": {"lamda": 0.3, "align": {"epoch": 1}}, "seed": "x"})
    assert "options.lamda = 0.3: unknown key; did you mean 'options.lam'?" in text
    assert "options.align.epoch = 1: unknown key; did you mean 'options.align.epochs'?" in text
    assert "seed = x" in text


@pytest.mark.parametrize("lam", [-0.1, 1.2, "often", float("nan"), [0.4], None])
def test_a_share_that_is_none_is_refused(lam: Any) -> None:
    assert "options.lam" in said({"method": "coma", "options": {"lam": lam}})


@pytest.mark.parametrize("lam", [0, 1, 0.25, "auto"])
def test_a_share_or_auto_is_taken(lam: Any) -> None:
    assert check({"method": "coma", "options": {"lam": lam}}).options["lam"] == lam


NONSENSE: list[dict[Any, Any]] = [
    {"options": 3},
    {"options": [1, 2]},
    {"options": "lam"},
    {"train": 3},
    {"train": None},
    {"train": [1]},
    {"data": "x"},
    {"stream": 4},
    {"model": []},
    {"method": 3},
    {"method": ["coma"]},
    {"method": None},
    {"dataset": None},
    {"dataset": {"a": 1}},
    {"backbone": 7},
    {"seed": None},
    {"seed": 2**32},
    {"seed": 1.5},
    {"stream": {"order_seed": 2**32}},
    {"stream": {"order_seed": -2}},
    {"stream": {"groups": [[0]], "base_classes": 3}},
    {"stream": {"groups": 5}},
    {"val_fraction": 1},
    {"val_fraction": float("nan")},
    {"train": {"lr": float("inf")}},
    {"model": {"img_size": 0}},
    {"model": {"img_size": -16}},
    {"train": {"epochs": 3, "milestones": [3]}},
    {1: 2},
    {"": 2},
    {"a.b": 2},
    {"keep_checkpoints": "perhaps"},
    {"dataset": "folder:"},
    {"dataset": "folder:/nowhere/at/all"},
]


def test_every_kind_of_nonsense_is_a_clear_error(subtests: pytest.Subtests) -> None:
    for values in NONSENSE:
        with subtests.test(values=values):
            text = said(values)
            assert "problem" in text
            assert str(next(iter(values))) in text
            assert "Traceback" not in text


# --- files and overrides ---------------------------------------------------------------------------


def test_a_file_and_overrides(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.yaml", "method: coma\noptions: {lam: 0.3}\ntrain:\n  epochs: 7\n  lr: 1e-3\n"
    )
    made = read(path, ["train.epochs=3", "options.align.epochs = 2", "seed=5", "train.milestones=[1, 2]"])
    assert made.train.epochs == 3
    assert made.train.lr == 0.001
    assert made.train.milestones == (1, 2)
    assert made.options["lam"] == 0.3
    assert made.options["align"]["epochs"] == 2
    assert made.seed == 5


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("1.0e-3", 1e-3), ("0.5", 0.5), ("2", 2.0)])
def test_numbers_on_the_command_line(text: str, value: float, tmp_path: Path) -> None:
    path = written(tmp_path / "a.yaml", "")
    assert read(path, [f"train.lr={text}"]).train.lr == value


def test_values_may_hold_equals_signs_and_null(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    path = written(tmp_path / "a.yaml", "method: seq_ft\ndata: {max_train_per_class: 3}")
    made = read(path, [f"dataset=folder:{tmp_path}/a=b", "data.max_train_per_class=null"])
    assert made.dataset.endswith("a=b")
    assert made.data.max_train_per_class is None


def test_an_override_replaces_a_scalar_by_keys(tmp_path: Path) -> None:
    path = written(tmp_path / "a.yaml", "train: 3\nmethod: seq_ft")
    assert read(path, ["train.epochs=2"]).train.epochs == 2


def test_every_wrong_override_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.yaml", "")
    with pytest.raises(CofimaError) as caught:
        read(path, ["epochs", "seed=3", "--x"])
    assert "'epochs': expected key=value" in str(caught.value)
    assert "'--x': expected key=value" in str(caught.value)
    with pytest.raises(CofimaError, match=r"train\.milestones"):
        read(path, ["train.milestones=[1, 2"])
    with pytest.raises(CofimaError, match=r"train\.lrr = 3: unknown key; did you mean 'train\.lr'"):
        read(path, ["train.lrr=3"])
    for text in ("=3", ".=3", "train.=3", ".lr=3"):
        with pytest.raises(CofimaError):
            read(path, [text])


@pytest.mark.parametrize(
    "text", ["a: [1", "\tx: 1", "- 1\n- 2", "just words", "3", "a: 1\na: : 2", "!!python/object:x {}"]
)
def test_a_file_that_is_not_a_mapping_is_named(text: str, tmp_path: Path) -> None:
    path = written(tmp_path / "broken.yaml", text)
    with pytest.raises(CofimaError, match=r"broken\.yaml"):
        read(path)


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00method")
    with pytest.raises(CofimaError, match=r"b\.yaml"):
        read(tmp_path / "b.yaml")


@pytest.mark.parametrize("name", ["absent.yaml", "", ".", "/", "no/such/place.yaml"])
def test_a_file_that_is_not_there(name: str) -> None:
    with pytest.raises(CofimaError, match="no configuration file"):
        read(name)


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert read(written(tmp_path / "a.yaml", "")) == check({})
    assert read(written(tmp_path / "b.yaml", "# only words\n")) == check({})


@pytest.mark.parametrize("name", config.recipes())
def test_every_packaged_recipe_is_right(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("caltech101", "cifar100"):  # what the recipes of studies look for
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("COFIMA_DATA", str(tmp_path))
    assert isinstance(read(name), Config)
    assert read(name.removesuffix(".yaml")) == read(name)


def test_a_recipe_may_say_more_for_each_method(tmp_path: Path) -> None:
    recipe = tmp_path / "both.yaml"
    recipe.write_text(
        "method: coma\ntrain: {epochs: 3, batch_size: 8}\n"
        "per_method:\n  coma: {options: {lam: 0.2}, train: {batch_size: 4}}\n  joint: {train: {lr: 0.5}}\n"
    )
    coma, joint = read(recipe), read(recipe, ["method=joint"])
    assert (coma.options["lam"], coma.train.batch_size, coma.train.epochs, coma.train.lr) == (0.2, 4, 3, 0.01)
    assert (joint.train.batch_size, joint.train.lr) == (8, 0.5)
    assert read(recipe, ["options.lam=0.7"]).options["lam"] == 0.7
    recipe.write_text("per_method: {comma: {}}")
    with pytest.raises(CofimaError, match=r"per_method\.comma: unknown method; did you mean 'coma'\?"):
        read(recipe)


def test_a_configuration_survives_json() -> None:
    for values in ({}, {"method": "coma", "options": {"lam": 1 / 3}, "stream": {"groups": [[0, "b"], [2]]}}):
        made = check(values)
        again = check(json.loads(json.dumps(made.model_dump(mode="json", exclude_unset=True))))
        assert difference(made.model_dump(mode="json"), again.model_dump(mode="json")) == []
        kept = Config.model_validate(json.loads(json.dumps(made.model_dump(mode="json"))))
        assert difference(made.model_dump(mode="json"), kept.model_dump(mode="json")) == []


# --- difference ------------------------------------------------------------------------------------


def test_the_difference_names_each_value_before_and_now() -> None:
    a = check({"method": "coma", "seed": 1})
    b = check({"method": "coma", "seed": 2, "options": {"align": {"lr": 0.5}}, "train": {"epochs": 3}})
    lines = difference(a.model_dump(mode="json"), b.model_dump(mode="json"))
    assert lines == [
        "options.align.lr: 0.01 before, 0.5 now",
        "seed: 1 before, 2 now",
        "train.epochs: 20 before, 3 now",
    ]
    assert difference({"a": 1}, {"a": 1, "b": {"c": 2}}) == ["b.c: not set before, 2 now"]
    assert difference({"a": {}}, {"a": {}}) == []
    assert difference({"a": {"b": 1}}, {"a": {}})


def test_how_errors_are_told() -> None:
    assert str(problems("x.yaml", ["a", "b"])) == "x.yaml has 2 problems:\n  a\n  b"
    assert str(problems("x.yaml", ["a"])).startswith("x.yaml has 1 problem:")
    assert did_you_mean("lamda", ["lam", "seed"]) == "; did you mean 'lam'?"
    assert did_you_mean("zzz", ["b", "a"]) == "; known: a, b"
    assert did_you_mean("zzz", []) == ""
