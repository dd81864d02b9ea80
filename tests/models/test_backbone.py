"""Backbones by name: building, loading of weights, and refused names and files."""

import pickle
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from pydantic import ValidationError
from safetensors.torch import save_file

from cofima.core import hub
from cofima.core.errors import CofimaError
from cofima.models import backbone
from cofima.models.backbone import create
from cofima.models.checkpoint_formats.reader import load_checkpoint, read_weights
from cofima.models.info import fingerprint
from cofima.models.options import ModelOptions

SCRATCH = ModelOptions(pretrained=False)


@pytest.mark.parametrize("name", ["vit_test", "resnet_test"])
def test_a_backbone_from_scratch_depends_on_its_seed_alone(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a, facts = create(name, SCRATCH, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    b, again = create(name, SCRATCH, seed=5)
    other, differs = create(name, SCRATCH, seed=6)
    assert facts == again
    assert fingerprint(a.state_dict()) == facts.sha256 == fingerprint(b.state_dict())
    assert differs.sha256 != facts.sha256 == fingerprint(a.state_dict()) != fingerprint(other.state_dict())


def test_facts_say_how_images_are_prepared(tiny) -> None:
    module, facts = create("vit_test", SCRATCH)
    assert (facts.name, facts.features, facts.size, facts.stored) == ("vit_test", 16, 16, 16)
    assert facts.classifier == "head"
    assert module(torch.zeros(2, 3, 16, 16)).shape == (2, 16)
    module, facts = create("resnet_test", SCRATCH)
    assert facts.classifier == "fc"
    assert module.eval()(torch.zeros(2, 3, 16, 16)).shape == (2, facts.features)


def test_the_embedded_backbone_is_there_offline() -> None:
    module, facts = create("vit_micro", ModelOptions())
    assert facts.name == "vit_micro.tiny_imagenet"
    assert (facts.features, facts.size, facts.mean) == (128, 64, (0.5, 0.5, 0.5))
    assert sum(p.numel() for p in module.parameters()) == pytest.approx(1.6e6, rel=0.05)
    assert facts.sha256 != create("vit_micro", SCRATCH)[1].sha256
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_another_size_is_taken_by_a_transformer_and_by_a_convolutional_net() -> None:
    for name in ("vit_test", "resnet_test"):
        module, facts = create(name, ModelOptions(pretrained=False, img_size=32))
        assert facts.size == 32
        assert module.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, facts.features)
        empty = backbone.build_empty(name, facts.size)
        empty.load_state_dict(module.state_dict())


def test_an_unknown_name_gets_a_hint() -> None:
    assert backbone.check("vit_micro") is None
    assert "did you mean 'vit_micro'" in str(backbone.check("vit_mircro"))
    with pytest.raises(CofimaError, match="unknown backbone 'resnet_tset'"):
        create("resnet_tset", SCRATCH)


def test_a_fingerprint_sees_one_bit_one_name_one_shape() -> None:
    weights = {"a": torch.zeros(4), "n": torch.tensor(3)}
    seen = {fingerprint(weights)}
    flipped = {"a": torch.zeros(4), "n": torch.tensor(3)}
    flipped["a"].view(torch.int32)[2] ^= 1
    seen.add(fingerprint(flipped))
    seen.add(fingerprint({"b": torch.zeros(4), "n": torch.tensor(3)}))
    seen.add(fingerprint({"a": torch.zeros(2, 2), "n": torch.tensor(3)}))
    seen.add(fingerprint({"a": torch.zeros(4).int(), "n": torch.tensor(3)}))
    assert len(seen) == 5
    assert fingerprint(dict(reversed(weights.items()))) in seen
    last = torch.arange(16.0).view(1, 4, 2, 2).to(memory_format=torch.channels_last)
    assert fingerprint({"a": last}) == fingerprint({"a": last.contiguous()})


@pytest.mark.parametrize("form", ["safetensors", "pth", "state_dict", "model", "with head"])
def test_a_checkpoint_fills_every_parameter(form: str, tmp_path: Path) -> None:
    source, _ = create("resnet_test", SCRATCH, seed=1)
    weights = source.state_dict()
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    if form == "safetensors":
        save_file(weights, path)
    elif form == "with head":
        torch.save(weights | {"fc.weight": torch.ones(5, 16), "fc.bias": torch.ones(5)}, path)
    else:
        torch.save(weights if form == "pth" else {form: weights, "epoch": 3}, path)
    module, facts = create("resnet_test", ModelOptions(checkpoint=path), seed=2)
    assert facts.sha256 == fingerprint(weights) == fingerprint(module.state_dict())
    assert facts.name == "resnet_test"


def test_a_checkpoint_that_does_not_fit_is_refused_with_every_misfit(tmp_path: Path) -> None:
    module, _ = create("vit_test", SCRATCH)
    before = fingerprint(module.state_dict())
    weights = dict(module.state_dict())
    del weights["cls_token"]
    weights |= {"norm.weight": torch.ones(3), "stray": torch.ones(1)}
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(CofimaError) as caught:
        load_checkpoint(module, tmp_path / "w.safetensors")
    said = str(caught.value)
    assert "missing: cls_token" in said
    assert "unexpected: stray" in said
    assert "shape of norm.weight: [3] in the file, [16] in the backbone" in said
    assert fingerprint(module.state_dict()) == before


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path("/tmp/cofima-test-unpickled"),))


def test_a_foreign_pickle_is_never_run(tmp_path: Path) -> None:
    Path("/tmp/cofima-test-unpickled").unlink(missing_ok=True)
    torch.save({"state_dict": {"w": torch.ones(1)}, "extra": Evil()}, tmp_path / "evil.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Evil(), protocol=2))
    for name in ("evil.pth", "plain.pth"):
        with pytest.raises(CofimaError, match=name):
            read_weights(tmp_path / name)
    assert not Path("/tmp/cofima-test-unpickled").exists()


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(100)}, tmp_path / "cut.safetensors")
    content = (tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[:-7])
    torch.save({"w": torch.ones(100)}, tmp_path / "cut.pth")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "cut.pth").read_bytes()[:300])
    (tmp_path / "empty.pth").write_bytes(b"")
    (tmp_path / "text.safetensors").write_text("hello")
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"w": 3}, tmp_path / "numbers.pth")
    for path in [*tmp_path.iterdir(), tmp_path / "absent.pth"]:
        with pytest.raises(CofimaError, match=path.name.replace(".", r"\.")):
            read_weights(path)


def test_weights_that_cannot_be_fetched_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(backbone.timm, "create_model", offline)
    with pytest.raises(CofimaError, match=r"model\.checkpoint=FILE"):
        create("resnet18", ModelOptions())


@pytest.mark.parametrize(("name", "size"), [("vit_micro", 7), ("vit_micro", 1)])
def test_images_too_small_for_a_backbone_are_one_error_before_any_work(name: str, size: int) -> None:
    with pytest.raises(
        CofimaError, match=f"model.img_size = {size}: too small for backbone '{name}'"
    ) as caught:
        create(name, ModelOptions(pretrained=False, img_size=size))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValidationError, match="less than or equal to 4096"):
        ModelOptions(img_size=100_000)


def test_names_of_the_hub_fail_at_once_without_a_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody takes connections there
    for name in ("resnet18.a1_in1k", "hf-hub:nobody/nothing"):
        start = time.monotonic()
        with pytest.raises(CofimaError, match=r"the hub cannot be reached\)\. Without a network give"):
            create(name, ModelOptions())
        assert time.monotonic() - start < 5
    assert capfd.readouterr().err == ""
    assert not constants.HF_HUB_OFFLINE  # as before


def test_the_embedded_backbone_asks_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "reachable", lambda *_: pytest.fail("the network was asked"))
    create("vit_micro", ModelOptions())


def test_the_embedded_backbone_sees_images_of_other_sizes() -> None:
    """Its positions are resampled; all else is as published."""
    small, facts = create("vit_micro", ModelOptions(img_size=32))
    own, _ = create("vit_micro", ModelOptions())
    assert facts.size == 32
    assert small(torch.zeros(1, 3, 32, 32)).shape == (1, 128)
    kept = {key: value for key, value in small.state_dict().items() if key != "pos_embed"}
    assert small.pos_embed.shape == (1, 1 + 4 * 4, 128)
    assert all(torch.equal(value, own.state_dict()[key]) for key, value in kept.items())
