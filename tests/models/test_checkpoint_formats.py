"""Checkpoints in the layouts in which they are published, each written by the test as the original is."""

import argparse
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock
from torchvision.models.resnet import ResNet as TorchvisionResNet

from cofima.core.errors import CofimaError
from cofima.models import backbone
from cofima.models.backbone import create
from cofima.models.checkpoint_formats.reader import FORMATS, load_checkpoint, read_weights
from cofima.models.info import fingerprint
from cofima.models.options import ModelOptions

Weights = dict[str, Tensor]
SCRATCH = ModelOptions(pretrained=False)


def vit(**shape: Any) -> VisionTransformer:
    """Return a small ViT without classifier whose every parameter differs from any initial value."""
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 0}
    net = VisionTransformer(**(options | shape))
    net.pretrained_cfg = {"classifier": "head"}
    return scrambled(net, 1)


def scrambled(net: nn.Module, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for value in net.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape, generator=generator).abs() + 0.1)
    return net


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def mlp_head(prefix: str) -> Weights:
    """A projection head of linear layers and batch normalization, as MoCo v3 and DINO have."""
    norm = {f"{prefix}.1.{k}": torch.ones(6) for k in ("weight", "bias", "running_mean", "running_var")}
    counter = {f"{prefix}.1.num_batches_tracked": torch.tensor(9)}
    return {f"{prefix}.0.weight": numbers(6, 12), **norm, **counter, f"{prefix}.3.weight": numbers(5, 6)}


def named(prefix: str, weights: Weights) -> Weights:
    return {f"{prefix}{key}": value for key, value in weights.items()}


def moco_v3(net: nn.Module) -> dict[str, Any]:
    """What main_moco.py saves: two encoders with projectors, a predictor, optimizer and scaler."""
    encoder = net.state_dict() | mlp_head("head")
    twin = {key: value + 1 for key, value in encoder.items()}
    weights = named("base_encoder.", encoder) | named("momentum_encoder.", twin) | mlp_head("predictor")
    moments = {0: {"step": 5, "exp_avg": numbers(3), "exp_avg_sq": numbers(3)}}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0]}]
    return {
        "epoch": 300,
        "arch": "vit_base",
        "state_dict": OrderedDict(named("module.", weights)),
        "optimizer": {"state": moments, "param_groups": groups},
        "scaler": {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3},
    }


def mae(net: nn.Module) -> dict[str, Any]:
    """The whole autoencoder: the encoder under timm's names, and what paints the patches."""
    decoder = {"decoder_embed.weight": numbers(8, 12), "decoder_embed.bias": numbers(8)}
    decoder |= {"decoder_pos_embed": numbers(1, 17, 8), "decoder_blocks.0.attn.qkv.weight": numbers(24, 8)}
    decoder |= {"decoder_norm.weight": numbers(8), "decoder_pred.weight": numbers(48, 8)}
    return {"model": net.state_dict() | {"mask_token": numbers(1, 1, 8)} | decoder}


def dino_whole(net: nn.Module) -> dict[str, Any]:
    """A training checkpoint of DINO: student and teacher, each a backbone with a projection head."""
    teacher = named("backbone.", net.state_dict()) | mlp_head("head.mlp")
    student = named("module.", {key: value + 1 for key, value in teacher.items()})
    return {"student": student, "teacher": teacher, "epoch": 400, "dino_loss": {"center": numbers(1, 5)}}


VIT_LAYOUTS = {
    "MoCo v3": moco_v3,
    "MoCo v3, converted by SLCA's authors": lambda net: {"model": net.state_dict()},
    "MAE": mae,
    "MAE, encoder alone": lambda net: {"model": net.state_dict()},
    "DINO, backbone alone": lambda net: OrderedDict(net.state_dict()),
    "DINO, whole": dino_whole,
    "DINOv2": lambda net: net.state_dict() | {"mask_token": numbers(1, 12)},
    "timm with classifier": lambda net: (
        net.state_dict()
        | {"head.weight": numbers(5, 12), "head.bias": numbers(5)}
        | {"pre_logits.fc.weight": numbers(12, 12), "pre_logits.fc.bias": numbers(12)}
    ),
    "DistributedDataParallel": lambda net: {"state_dict": named("module.", net.state_dict())},
    "DistributedDataParallel and compiled": lambda net: named("module._orig_mod.", net.state_dict()),
}
SAID = {
    "MoCo v3": "MoCo v3; left out head (7), momentum_encoder (37), predictor (7)",
    "MAE": "MAE; left out decoder_blocks (1), decoder_embed (2), decoder_norm (1), decoder_pos_embed (1), "
    "decoder_pred (1), mask_token (1)",
    "DINO, whole": "DINO; left out head (7)",
    "DINOv2": "DINOv2; left out mask_token (1)",
    "timm with classifier": "timm's names; left out head (2), pre_logits (2)",
}


@pytest.mark.parametrize("name", ["weights.pth", "weights.pth.tar"])
@pytest.mark.parametrize("layout", VIT_LAYOUTS)
def test_every_layout_gives_the_weights_that_were_put_in(layout: str, name: str, tmp_path: Path) -> None:
    source = vit(init_values=0.5) if layout == "DINOv2" else vit()
    torch.save(VIT_LAYOUTS[layout](source), tmp_path / name)
    target = scrambled(vit(init_values=0.5) if layout == "DINOv2" else vit(), 2)
    said = load_checkpoint(target, tmp_path / name)
    assert said == SAID.get(layout, "timm's names")
    assert fingerprint(target.state_dict()) == fingerprint(source.state_dict())


def test_every_format_is_named_in_the_error_for_another(tmp_path: Path) -> None:
    (tmp_path / "weights.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(CofimaError, match=r"weights\.h5"):
        read_weights(tmp_path / "weights.h5")
    assert all(suffix in FORMATS for suffix in (".pth", ".pth.tar", ".safetensors", ".npz"))


def test_layouts_are_recognized_in_safetensors_too(tmp_path: Path) -> None:
    source, target = vit(), scrambled(vit(), 2)
    save_file(moco_v3(source)["state_dict"], tmp_path / "moco.safetensors")
    assert load_checkpoint(target, tmp_path / "moco.safetensors") == SAID["MoCo v3"]
    assert fingerprint(target.state_dict()) == fingerprint(source.state_dict())


@pytest.mark.parametrize("layout", VIT_LAYOUTS)
def test_what_does_not_fit_is_listed_at_once_and_nothing_changes(layout: str, tmp_path: Path) -> None:
    source = vit(depth=3)
    source.norm = nn.LayerNorm(7)
    del source.cls_token
    torch.save(VIT_LAYOUTS[layout](source), tmp_path / "w.pth")
    target = vit()
    before = fingerprint(target.state_dict())
    with pytest.raises(CofimaError) as caught:
        load_checkpoint(target, tmp_path / "w.pth")
    said = str(caught.value)
    assert "missing: cls_token" in said
    assert "unexpected: blocks.2.norm1.weight" in said
    assert "shape of norm.weight: [7] in the file, [12] in the backbone" in said
    assert fingerprint(target.state_dict()) == before


def test_a_long_list_of_misfits_is_cut_with_its_length(tmp_path: Path) -> None:
    torch.save(vit(depth=6).state_dict(), tmp_path / "w.pth")
    with pytest.raises(CofimaError, match=r"\.\.\. and 28 more"):
        load_checkpoint(vit(), tmp_path / "w.pth")


@pytest.mark.parametrize(("stored", "built"), [(28, 16), (16, 28)])
def test_positions_are_resampled_as_timm_does(stored: int, built: int, tmp_path: Path) -> None:
    source = vit(img_size=stored, init_values=0.5)
    torch.save(VIT_LAYOUTS["DINOv2"](source), tmp_path / "w.pth")
    target = scrambled(vit(img_size=built, init_values=0.5), 2)
    said = load_checkpoint(target, tmp_path / "w.pth")
    a, b = stored // 4, built // 4
    assert said == f"DINOv2; left out mask_token (1); positions {a} x {a} resampled to {b} x {b}"
    expected = checkpoint_filter_fn(VIT_LAYOUTS["DINOv2"](source), target)
    assert expected["pos_embed"].shape == (1, b * b + 1, 12)
    assert fingerprint(target.state_dict()) == fingerprint(expected)


def test_positions_that_form_no_square_are_refused(tmp_path: Path) -> None:
    weights = vit().state_dict() | {"pos_embed": numbers(1, 12, 12)}
    torch.save(weights, tmp_path / "w.pth")
    with pytest.raises(CofimaError, match=r"shape of pos_embed: \[1, 12, 12\]"):
        load_checkpoint(vit(), tmp_path / "w.pth")


def torchvision_resnet() -> TorchvisionResNet:
    return scrambled(TorchvisionResNet(BasicBlock, [1, 1, 1, 1], num_classes=5), 3)


@pytest.mark.parametrize("old", [False, True])
def test_torchvisions_resnet_gives_the_same_features(old: bool, tmp_path: Path) -> None:
    source = torchvision_resnet()
    weights = source.state_dict()
    if old:  # as written before torch 0.4.1: resnet18-5c106cde.pth
        weights = OrderedDict((k, v) for k, v in weights.items() if "num_batches" not in k)
    torch.save(weights, tmp_path / "resnet.pth")
    target = timm.create_model("resnet10t", num_classes=0, stem_type="", stem_width=64, avg_down=False)
    said = load_checkpoint(target, tmp_path / "resnet.pth")
    counters = "; 12 counters of batch normalization set to 0" if old else ""
    assert said == f"torchvision's names; left out fc (2){counters}"
    images = numbers(2, 3, 32, 32)
    source.fc = nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(target.eval()(images), source.eval()(images))


def jax_arrays(net: VisionTransformer, classes: int = 5) -> dict[str, np.ndarray]:
    """Write a ViT as google-research/vision_transformer does: kernels as [in, out], heads apart."""
    w = {key: value.numpy() for key, value in net.state_dict().items()}
    width, heads = net.embed_dim, net.blocks[0].attn.num_heads
    found = {
        "cls": w["cls_token"],
        "Transformer/posembed_input/pos_embedding": w["pos_embed"],
        "embedding/kernel": w["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": w["patch_embed.proj.bias"],
        "Transformer/encoder_norm/scale": w["norm.weight"],
        "Transformer/encoder_norm/bias": w["norm.bias"],
        "head/kernel": np.ones((width, classes), np.float32),
        "head/bias": np.ones(classes, np.float32),
    }
    for n in range(len(net.blocks)):
        ours, theirs = f"blocks.{n}.", f"Transformer/encoderblock_{n}/"
        attention = f"{theirs}MultiHeadDotProductAttention_1/"
        kernels = w[f"{ours}attn.qkv.weight"].reshape(3, heads, width // heads, width)
        biases = w[f"{ours}attn.qkv.bias"].reshape(3, heads, width // heads)
        for place, part in enumerate(("query", "key", "value")):
            found[f"{attention}{part}/kernel"] = kernels[place].transpose(2, 0, 1)
            found[f"{attention}{part}/bias"] = biases[place]
        out = w[f"{ours}attn.proj.weight"].reshape(width, heads, width // heads)
        found[f"{attention}out/kernel"] = out.transpose(1, 2, 0)
        found[f"{attention}out/bias"] = w[f"{ours}attn.proj.bias"]
        for ln, norm in (("LayerNorm_0", "norm1"), ("LayerNorm_2", "norm2")):
            found[f"{theirs}{ln}/scale"] = w[f"{ours}{norm}.weight"]
            found[f"{theirs}{ln}/bias"] = w[f"{ours}{norm}.bias"]
        for dense, fc in (("Dense_0", "fc1"), ("Dense_1", "fc2")):
            found[f"{theirs}MlpBlock_3/{dense}/kernel"] = w[f"{ours}mlp.{fc}.weight"].T
            found[f"{theirs}MlpBlock_3/{dense}/bias"] = w[f"{ours}mlp.{fc}.bias"]
    return found


@pytest.mark.parametrize("form", ["augreg", "original", "with optimizer"])
def test_jax_archives_fill_every_weight(form: str, tmp_path: Path) -> None:
    source, target = vit(), scrambled(vit(), 2)
    arrays = jax_arrays(source)
    if form == "original":  # ViT-B_16.npz has a layer before its classifier
        arrays |= {"pre_logits/kernel": np.ones((12, 12), np.float32), "pre_logits/bias": np.ones(12)}
    if form == "with optimizer":
        arrays = {f"opt/target/{key}": value for key, value in arrays.items()}
    np.savez(tmp_path / "vit.npz", **arrays)
    said = load_checkpoint(target, tmp_path / "vit.npz")
    before = ", pre_logits/bias, pre_logits/kernel" if form == "original" else ""
    assert said == f"JAX; left out head/bias, head/kernel{before}"
    assert fingerprint(target.state_dict()) == fingerprint(source.state_dict())


def test_jax_positions_are_resampled(tmp_path: Path) -> None:
    source, target = vit(img_size=28), scrambled(vit(), 2)
    np.savez(tmp_path / "vit.npz", **jax_arrays(source))
    assert "50 positions resampled to 17" in load_checkpoint(target, tmp_path / "vit.npz")
    assert torch.equal(target.pos_embed[:, 0], source.pos_embed[:, 0])
    assert torch.equal(target.norm.weight, source.norm.weight)


def test_a_jax_archive_that_does_not_fit_is_refused_with_every_misfit(tmp_path: Path) -> None:
    arrays = jax_arrays(vit(depth=3, num_heads=6))
    del arrays["cls"]
    arrays["Transformer/encoder_norm/scale"] = np.ones(7, np.float32)
    np.savez(tmp_path / "vit.npz", **arrays)
    target = vit()
    before = fingerprint(target.state_dict())
    with pytest.raises(CofimaError) as caught:
        load_checkpoint(target, tmp_path / "vit.npz")
    said = str(caught.value)
    assert "missing: cls" in said
    assert "unexpected: Transformer/encoderblock_2/" in said
    assert (
        "shape of Transformer/encoder_norm/scale: [7] in the file, norm.weight [12] in the backbone" in said
    )
    assert fingerprint(target.state_dict()) == before


def test_other_heads_of_the_same_total_size_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **jax_arrays(vit(num_heads=6)))
    with pytest.raises(CofimaError, match=r"query/kernel: \[12, 6, 2\] in the file, blocks\.0\.attn\.qkv"):
        load_checkpoint(vit(), tmp_path / "vit.npz")


def test_layer_scale_is_not_left_at_its_initial_value(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **jax_arrays(vit()))
    with pytest.raises(CofimaError, match=r"missing: blocks\.0\.ls1\.gamma \(JAX files have none\)"):
        load_checkpoint(vit(init_values=0.5), tmp_path / "vit.npz")


def test_a_weight_that_timm_leaves_empty_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "vit.npz", **jax_arrays(vit()))
    monkeypatch.setattr(VisionTransformer, "load_pretrained", lambda self, path: self.norm.reset_parameters())
    with pytest.raises(CofimaError, match="no numbers for cls_token") as caught:
        load_checkpoint(vit(), tmp_path / "vit.npz")
    assert "norm.weight" not in str(caught.value).replace("norm1", "").replace("norm2", "")


def test_jax_archives_are_refused_by_other_networks_and_when_broken(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **jax_arrays(vit()))
    resnet, _ = create("resnet_test", SCRATCH)
    with pytest.raises(CofimaError, match="this backbone is a ResNet"):
        load_checkpoint(resnet, tmp_path / "vit.npz")
    whole = (tmp_path / "vit.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npz").write_text("hello")
    np.savez(tmp_path / "objects.npz", cls=np.array([{"a": 1}], dtype=object))
    for name in ("cut.npz", "text.npz", "objects.npz", "absent.npz"):
        with pytest.raises(CofimaError, match=name.replace(".", r"\.")):
            load_checkpoint(vit(), tmp_path / name)


def test_a_file_with_more_than_tensors_says_how_to_convert_it(tmp_path: Path) -> None:
    content = moco_v3(vit()) | {"args": argparse.Namespace(lr=0.1)}
    torch.save(content, tmp_path / "moco.pth.tar")
    with pytest.raises(CofimaError) as caught:
        read_weights(tmp_path / "moco.pth.tar")
    said = str(caught.value)
    assert "holds more than tensors (argparse.Namespace)" in said
    command = said.splitlines()[-1].strip().removeprefix('python -c "').removesuffix('"')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec(command, {})  # what the message says works, for a file that one trusts
    target = scrambled(vit(), 2)
    assert load_checkpoint(target, tmp_path / "weights.safetensors") == SAID["MoCo v3"]
    assert fingerprint(target.state_dict()) == fingerprint(vit().state_dict())


def test_numbers_in_numpy_beside_the_weights_are_refused_with_their_name(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": numbers(1)}, "best": np.float64(0.5)}, tmp_path / "w.pth")
    with pytest.raises(CofimaError, match="holds more than tensors"):
        read_weights(tmp_path / "w.pth")


def test_a_run_says_how_its_file_was_read(tmp_path: Path) -> None:
    source, _ = create("vit_test", SCRATCH, seed=4)
    torch.save(moco_v3(source), tmp_path / "w.pth.tar")
    module, facts = create("vit_test", ModelOptions(checkpoint=tmp_path / "w.pth.tar"))
    assert facts.sha256 == fingerprint(source.state_dict()) == fingerprint(module.state_dict())
    assert facts.layout.startswith("MoCo v3; left out")
    assert facts.pretraining == "not known (weights from w.pth.tar)"
    assert backbone.create("vit_test", SCRATCH)[1].layout == ""


ODD = {
    "meta": (lambda: torch.empty(3, device="meta"), "on the device 'meta'"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "stored as sparse_coo"),
    "rows": (lambda: torch.eye(3).to_sparse_csr(), "stored as sparse_csr"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        r"quantized \(qint8\)",
    ),
    "complex": (lambda: torch.ones(3, dtype=torch.complex64), "complex numbers"),
    "expanded": (lambda: torch.ones(1).expand(10**12), "claims 4,000,000,000,000 bytes, and 4 are there"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_a_tensor_without_plain_numbers_is_named(kind: str, tmp_path: Path) -> None:
    make, reason = ODD[kind]
    torch.save({"good": torch.ones(2), "odd.weight": make()}, tmp_path / "a.pth")
    with pytest.raises(CofimaError, match=rf"a.pth has 1 problem:\n  odd.weight: {reason}"):
        read_weights(tmp_path / "a.pth")


def test_complex_safetensors_are_named_too(tmp_path: Path) -> None:
    save_file({"odd": torch.ones(2, dtype=torch.complex64)}, tmp_path / "a.safetensors")
    with pytest.raises(CofimaError, match="odd: complex numbers"):
        read_weights(tmp_path / "a.safetensors")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_tar_of_links_is_one_sentence_and_no_link_is_followed(kind: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.pth.tar", "w") as tar:
        for name, target in (("storages", "storages"), ("tensors", "/etc/passwd"), ("pickle", "../secret")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            tar.addfile(member)
    with pytest.raises(CofimaError, match="truncated or not a checkpoint") as caught:
        read_weights(tmp_path / "a.pth.tar")
    assert "\n" not in str(caught.value)


def npy(shape: tuple[int, ...], kind: str = "<f4", version: bytes = b"\x01\x00") -> bytes:
    """The header of an array, whatever follows it."""
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + version + len(head).to_bytes(2, "little") + head


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (npy((20_000_000_000_000,)), "claims 80,000,000,000,0.. bytes and has"),
        (npy((2,)) + bytes(7), "claims"),
        (npy((-1, 4)) + bytes(16), "claims|negative"),
        (npy((1,), "|O") + bytes(8), "holds object, not numbers"),
        (npy((1,), "|V9999999") + bytes(8), "not numbers"),
        (npy((1,), version=b"\x09\x09"), "not a .npz"),
        (b"no array", "not a .npz"),
        (b"", "not a .npz"),
    ],
)
def test_an_array_that_is_not_there_is_not_waited_for(content: bytes, reason: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("cls.npy", content)
    with pytest.raises(CofimaError, match=reason):
        load_checkpoint(vit(), tmp_path / "a.npz")


def test_a_text_in_place_of_a_checkpoint_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 46\n")
    with pytest.raises(CofimaError, match=r"a text, which begins 'version https://git-lfs.*pointer"):
        read_weights(path)
