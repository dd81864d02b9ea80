"""``cofima list`` and ``cofima show`` are complete."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cofima import methods
from cofima.experiment.config import recipes
from cofima.models.registry import ALIASES

Run = Callable[..., Any]


def test_list_and_show_know_every_method(cofima: Run, tmp_path: Path) -> None:
    listed = cofima("list", "methods", cwd=tmp_path).stdout
    for name in methods.names():
        assert name in listed
    shown = cofima("show", "cofima", cwd=tmp_path).stdout
    for word in ("options.lam", "number | auto", "paper | authors", "arxiv.org", "θ*_t"):
        assert word in shown


def test_list_knows_every_alias_and_what_works_offline(cofima: Run, tmp_path: Path) -> None:
    listed = cofima("list", "backbones", cwd=tmp_path).stdout
    for name, alias in ALIASES.items():
        assert name in listed
        assert alias.timm in listed
    assert listed.splitlines()[1].split()[:2] == ["vit_micro", "vit_micro.tiny_imagenet"]
    assert "embedded" in listed


def test_list_knows_every_recipe_and_its_first_sentence(cofima: Run, tmp_path: Path) -> None:
    listed = cofima("list", "recipes", cwd=tmp_path).stdout.splitlines()
    rows = dict(line.split(maxsplit=1) for line in listed if ".yaml" in line.split(maxsplit=1)[0])
    assert set(rows) == set(recipes())
    assert rows["table1.yaml"].strip() == "The protocol of the paper's Tables 1 to 3"
    assert "cofima grid NAME" in listed[-1]


def test_a_narrow_terminal_lists_backbones_without_timms_names(cofima: Run, tmp_path: Path) -> None:
    listed = cofima("list", "backbones", cwd=tmp_path, COLUMNS="80").stdout.splitlines()
    assert listed[1].split() == ["vit_micro", "1.6", "M", "6", "64", "Tiny-ImageNet", "embedded"]
    assert "timm's own names" in listed[-1]
