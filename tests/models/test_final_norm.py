"""The final layer norm: kept, or fresh; and the same after a model folder has been read back."""

import json
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from cofima.core.errors import CofimaError
from cofima.experiment.launch import launch
from cofima.models import backbone
from cofima.models.backbone import create
from cofima.models.options import ModelOptions
from cofima.store import model_folder
from cofima.store.model import load_model


def test_a_reset_norm_is_a_fresh_one_and_nothing_else_changes(pretrained: Path) -> None:
    kept, kept_facts = create("vit_test", ModelOptions(checkpoint=pretrained))
    fresh, facts = create("vit_test", ModelOptions(checkpoint=pretrained, final_norm="reset"))
    assert (kept_facts.final_norm, facts.final_norm) == ("pretrained", "reset")
    assert kept_facts.sha256 != facts.sha256
    assert not torch.equal(kept.norm.weight, torch.ones(16))
    new = nn.LayerNorm(16)
    assert (fresh.norm.eps, kept.norm.eps) == (new.eps, 1e-6)
    same = {key for key, value in kept.state_dict().items() if torch.equal(value, fresh.state_dict()[key])}
    assert kept.state_dict().keys() - same == {"norm.weight", "norm.bias"}
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    fresh.eval()
    expected = fresh.forward_features(images)
    kept.norm = new  # what the released code does
    assert torch.equal(kept.eval().forward_features(images), expected)


def test_a_network_without_a_final_norm_is_refused() -> None:
    with pytest.raises(
        CofimaError, match=r"final_norm = reset: backbone 'resnet_test' \(ResNet\) has no final"
    ):
        create("resnet_test", ModelOptions(pretrained=False, final_norm="reset"))


def test_the_norm_is_found_where_other_networks_have_it() -> None:
    with torch.device("meta"):
        averaged = timm.create_model("vit_tiny_patch16_224", num_classes=0, global_pool="avg")
        convnext = timm.create_model("convnext_atto", num_classes=0)
    assert backbone.final_norm(averaged) is averaged.fc_norm
    assert backbone.final_norm(convnext) is convnext.head.norm


def test_a_model_folder_reads_the_norm_back(tiny, tmp_path: Path, same_bits) -> None:
    config = tiny.config("seq_ft", model={"pretrained": False, "final_norm": "reset"}, train={"epochs": 1})
    model = launch(config, tmp_path / "run")
    again = load_model(tmp_path / "run", where="cpu")
    assert again.backbone.final_norm == "reset"
    assert again.method.net.backbone.norm.eps == model.method.net.backbone.norm.eps == backbone.RESET_NORM_EPS
    same_bits(again.weights(), model.weights())
    assert model.history[-1].distance.from_start is not None


def test_a_run_records_the_identity_of_its_backbone(tiny, tmp_path: Path, pretrained: Path) -> None:
    config = tiny.config("seq_ft", model={"checkpoint": str(pretrained)}, train={"epochs": 1})
    launch(config, tmp_path / "run")
    kept = json.loads((model_folder.current(tmp_path / "run") / "config.json").read_text())["backbone"]
    assert kept["pretraining"] == "not known (weights from vit_test.safetensors)"
    assert (kept["overlap"], kept["layout"], kept["final_norm"]) == (
        "not known",
        "timm's names",
        "pretrained",
    )
