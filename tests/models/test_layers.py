"""Features of all layers: against timm's own intermediate features, and wherever a backbone is used."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import cofima
from cofima.classifier.export.formats import to_torchscript
from cofima.classifier.export.plain_timm import to_timm
from cofima.core.errors import CofimaError
from cofima.experiment.launch import launch
from cofima.models.backbone import build_like, create
from cofima.models.layers import blocks, join_layers, width
from cofima.models.options import ModelOptions
from cofima.store.model import load_model
from cofima.weights.fisher import diagonal
from cofima.weights.fisher.diagonal import diagonal_fisher

IMAGES = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
ALL = {"pretrained": False, "layers": "all"}


def rooted(features: Tensor) -> Tensor:
    return normalize(features.sign() * features.abs().sqrt(), dim=1)


def plain_and_joined(name: str, balanced: bool = False, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a network of timm and the same one with the features of all its layers."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(timm.create_model(name, num_classes=0, **options).eval())
    join_layers(made[1], name, balanced)
    return made[0], made[1]


@torch.no_grad()
def test_of_a_transformer_they_are_the_pooled_tokens_of_every_block() -> None:
    plain, joined = plain_and_joined("vit_tiny_patch16_224", img_size=32)
    last, inner = plain.forward_intermediates(IMAGES, output_fmt="NLC", return_prefix_tokens=True)
    pooled = [torch.cat([prefix, tokens], 1).mean(1) for tokens, prefix in inner]
    expected = torch.cat([rooted(part) for part in (plain.forward_head(last), *pooled)], 1)
    torch.testing.assert_close(joined(IMAGES), expected, atol=1e-3, rtol=0)
    assert joined(IMAGES).shape[1] == width(joined, 32) == 13 * 192


@torch.no_grad()
def test_of_a_convolutional_network_they_are_the_means_over_positions() -> None:
    plain, joined = plain_and_joined("tf_efficientnet_lite0")
    x, parts = plain.bn1(plain.conv_stem(IMAGES)), [plain(IMAGES)]
    for stage in plain.blocks:
        for block in stage:
            x = block(x)
            parts.append(x.mean((2, 3)))
    expected = torch.cat([rooted(part) for part in parts], 1)
    torch.testing.assert_close(joined(IMAGES), expected, atol=1e-3, rtol=0)


@torch.no_grad()
def test_balanced_the_last_layer_is_as_long_as_all_blocks() -> None:
    (_, joined), (_, balanced) = (plain_and_joined("resnet18", way) for way in (False, True))
    last, inner = balanced(IMAGES).split([512, 2 * (64 + 128 + 256 + 512)], 1)
    torch.testing.assert_close(last, 8**0.5 * joined(IMAGES)[:, :512])
    torch.testing.assert_close(last.norm(dim=1), inner.norm(dim=1))
    assert torch.equal(inner, joined(IMAGES)[:, 512:])


@torch.no_grad()
def test_channels_may_be_last() -> None:
    plain, joined = plain_and_joined("swin_tiny_patch4_window7_224", img_size=32, window_size=4)
    found, outputs = joined(IMAGES), []
    handles = [b.register_forward_hook(lambda _, __, out: outputs.append(out)) for b in blocks(plain)]
    parts = [plain(IMAGES), *(out.mean((1, 2)) for out in outputs)]
    assert len(handles) == 12
    torch.testing.assert_close(found, torch.cat([rooted(part) for part in parts], 1), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet18", 8),
        ("convnext_atto", 12),
        ("mobilenetv3_small_100", 12),
        ("regnetx_002", 13),
        ("mixer_s32_224", 8),
    ],
)
def test_blocks_are_found_in_families_of_networks(name: str, count: int) -> None:
    with torch.device("meta"):
        assert len(blocks(timm.create_model(name, num_classes=0))) == count


def test_a_pass_that_failed_leaves_nothing_behind() -> None:
    joined, _ = create("resnet_test", ModelOptions.model_validate(ALL))
    joined.eval()
    expected = joined(IMAGES)

    def fail(*given: Any) -> None:
        raise RuntimeError("in the last block")

    hook = blocks(joined)[-1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the last block"):
        joined(IMAGES)
    hook.remove()
    assert torch.equal(joined(IMAGES), expected)


@pytest.mark.parametrize("layers", ["all", "balanced"])
def test_the_weights_are_those_of_the_last_layer_alone(layers: str, same_bits: Any) -> None:
    joined, facts = create("vit_test", ModelOptions.model_validate(ALL | {"layers": layers}), seed=1)
    plain, known = create("vit_test", ModelOptions(pretrained=False), seed=1)
    same_bits(joined.state_dict(), plain.state_dict())
    assert (facts.sha256, facts.features, known.features) == (known.sha256, 48, 16)
    again = build_like(facts)
    again.load_state_dict(joined.state_dict())
    images = IMAGES[:, :, :16, :16]
    assert torch.equal(again.eval()(images), joined.eval()(images))


def test_a_network_whose_blocks_are_not_known_is_refused() -> None:
    with pytest.raises(
        CofimaError, match=r"model\.layers = all: the blocks of backbone 'mine' \(Sequential\)"
    ):
        join_layers(nn.Sequential(nn.Conv2d(3, 4, 3)), "mine")


def test_fisher_information_counts_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through all layers, squared gradients are those of one image at a time."""
    monkeypatch.setattr(diagonal, "FEW", 1)  # by the rules
    module, facts = create("vit_test", ModelOptions.model_validate(ALL))
    net = nn.Sequential(module, nn.Linear(facts.features, 3)).eval()
    images, labels = IMAGES[:, :, :16, :16], torch.tensor([0, 1, 2, 0, 1])
    found = diagonal_fisher(net, [(images, labels)])
    expected = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for image, label in zip(images, labels, strict=True):
        net.zero_grad()
        nn.functional.cross_entropy(net(image[None]), label[None]).backward()
        for name, p in net.named_parameters():
            expected[name] += p.grad.square() / len(images)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-7 * float(value.max() + 1))


@pytest.mark.parametrize(
    ("method", "options"),
    [("slda", {}), ("ranpac", {}), ("slca", {}), ("cofima", {"classifier": "lda", "drift": "linear"})],
)
def test_a_run_resumes_and_is_loaded_as_it_was(
    tiny: Any, tmp_path: Path, same_bits: Any, method: str, options: dict[str, Any]
) -> None:
    stream = {"groups": [["blob 0", "blob 1"], ["blob 2"], ["blob 3", "blob 4"]]}
    few = {"max_train_per_class": 8, "max_test_per_class": 5}
    config = tiny.config(method, options=options, model=ALL, stream=stream, data=few)
    whole = launch(config, tmp_path / "whole")
    launch(config, tmp_path / "cut", tasks=1)
    same_bits(launch(config, tmp_path / "cut").weights(), whole.weights())
    again = load_model(tmp_path / "whole", where="cpu")
    images = torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(again.logits(images), whole.logits(images))
    assert again.backbone.features == 48


def test_exports_hold_all_layers_or_refuse(tiny: Any, tmp_path: Path) -> None:
    model = tiny.run(tmp_path / "run", tiny.config("slda", model=ALL), tiny.stream((2, 1)))
    images = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8)
    assert to_torchscript(model, tmp_path / "model.pt", images).difference < 1e-3
    with pytest.raises(CofimaError, match=r"its head sees all layers of the backbone"):
        to_timm(model, tmp_path / "plain.safetensors", images)


def test_models_of_other_layers_are_not_merged(tiny: Any, tmp_path: Path) -> None:
    stream = tiny.stream((2, 1))
    for name, model in (("all", ALL), ("last", {"pretrained": False})):
        tiny.run(tmp_path / name, tiny.config("slda", model=model), stream)
    with pytest.raises(CofimaError, match="layers: all in"):
        cofima.merge([tmp_path / "all", tmp_path / "last"], tmp_path / "merged")
    cofima.merge([tmp_path / "all", tmp_path / "all"], tmp_path / "twice")
    images = torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8)
    merged, known = (load_model(tmp_path / name, where="cpu").logits(images) for name in ("twice", "all"))
    torch.testing.assert_close(merged, known, rtol=1e-3, atol=1e-3)
