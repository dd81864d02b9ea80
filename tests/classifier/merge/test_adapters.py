"""Averages of LoRA adapters: exact for the change of every weight, with heads matched by names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import cofima
from cofima.classifier.merge.adapters import CONFIG, MODEL_CONFIG, WEIGHTS
from cofima.core.errors import CofimaError

PREFIX = "base_model.model."


def adapter(
    folder: Path, rank: int, names: list[str], seed: int, layers: tuple[str, ...] = ("q",), **more: Any
) -> Path:
    """Write a folder as peft does, for layers of 5 x 4 and a head of one row a class."""
    chance = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in layers:
        weights[f"{PREFIX}{layer}.lora_A.weight"] = torch.randn(rank, 4, generator=chance)
        weights[f"{PREFIX}{layer}.lora_B.weight"] = torch.randn(5, rank, generator=chance)
    weights[f"{PREFIX}head.weight"] = torch.randn(len(names), 5, generator=chance)
    weights[f"{PREFIX}head.bias"] = torch.randn(len(names), generator=chance)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(layers)}
    folder.mkdir()
    save_file(weights, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config | {"modules_to_save": ["head"]} | more))
    (folder / MODEL_CONFIG).write_text(json.dumps({"id2label": dict(enumerate(names)), "hidden_size": 5}))
    return folder


def change(folder: Path, layer: str) -> Tensor:
    """Return what an adapter adds to a layer's weight."""
    weights, config = load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())
    down = weights[f"{PREFIX}{layer}.lora_A.weight"]
    alpha = config.get("alpha_pattern", {}).get(layer, config["lora_alpha"])
    scale = alpha / (len(down) ** 0.5 if config.get("use_rslora") else len(down))
    return scale * weights[f"{PREFIX}{layer}.lora_B.weight"] @ down


def test_the_change_of_each_weight_is_averaged(tmp_path: Path) -> None:
    a = adapter(tmp_path / "a", 2, ["cat", "dog"], 0, ("q", "v"), alpha_pattern={"v": 3})
    b = adapter(tmp_path / "b", 3, ["dog", "owl", "bee"], 1, ("q", "k"), use_rslora=True)
    done = cofima.merge([a, b], tmp_path / "out", lam=0.3)
    assert done.classes == ["cat", "dog", "owl", "bee"]
    expected = {
        "q": 0.7 * change(a, "q") + 0.3 * change(b, "q"),
        "v": 0.7 * change(a, "v"),
        "k": 0.3 * change(b, "k"),
    }
    for layer, value in expected.items():
        torch.testing.assert_close(change(tmp_path / "out", layer), value)
    one, two, out = (load_file(path / WEIGHTS)[f"{PREFIX}head.weight"] for path in (a, b, tmp_path / "out"))
    torch.testing.assert_close(out, torch.stack([one[0], 0.7 * one[1] + 0.3 * two[0], two[1], two[2]]))
    written = json.loads((tmp_path / "out" / MODEL_CONFIG).read_text())
    assert written["id2label"] == {"0": "cat", "1": "dog", "2": "owl", "3": "bee"}
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["target_modules"] == ["k", "q", "v"]


def test_several_adapters_by_weights(tmp_path: Path) -> None:
    folders = [adapter(tmp_path / f"{seed}", 2, ["cat", "dog"], seed) for seed in range(3)]
    cofima.merge(folders, tmp_path / "out", weights=[1, 1, 2])
    expected = (change(folders[0], "q") + change(folders[1], "q") + 2 * change(folders[2], "q")) / 4
    torch.testing.assert_close(change(tmp_path / "out", "q"), expected)


def test_what_cannot_be_averaged_is_refused(tmp_path: Path) -> None:
    a = adapter(tmp_path / "a", 2, ["cat", "dog"], 0)
    odd = adapter(tmp_path / "odd", 2, ["cat", "dog"], 1, use_dora=True)
    unnamed = adapter(tmp_path / "unnamed", 2, ["LABEL_0", "LABEL_1", "LABEL_2"], 1)
    (tmp_path / "folder").mkdir()
    other = adapter(tmp_path / "other", 2, ["cat", "dog"], 1)
    kept = load_file(other / WEIGHTS)
    save_file({key: value for key, value in kept.items() if "bias" not in key}, other / WEIGHTS)
    for models, more, said in (
        ([a, odd], {}, "type DORA"),
        ([a, unnamed], {}, "need names"),
        ([a, tmp_path / "folder"], {}, "is no adapter of peft"),
        ([a, other], {}, "both must save that module"),
        ([a, other], {"method": "ties", "base": a}, "adapters can be averaged only"),
    ):
        with pytest.raises(CofimaError, match=said):
            cofima.merge(models, tmp_path / "out", **more)
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_peft_itself_reads_what_is_written(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra [peft] is not installed")

    class Network(nn.Module):
        def __init__(self, classes: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(4, 5), nn.Linear(5, classes)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(torch.tanh(self.body(x)))
            return result

    bodies = []
    for number, names in enumerate((["cat", "dog"], ["owl"])):
        how = peft.LoraConfig(
            r=2 + number,
            lora_alpha=4,
            target_modules=["body"],
            modules_to_save=["head"],
            init_lora_weights=False,
        )
        model = peft.get_peft_model(Network(len(names)), how)
        model.save_pretrained(tmp_path / f"{number}")
        (tmp_path / f"{number}" / MODEL_CONFIG).write_text(json.dumps({"id2label": dict(enumerate(names))}))
        bodies.append(model.merge_and_unload())
    cofima.merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out", lam=0.25)
    merged = peft.PeftModel.from_pretrained(Network(3), tmp_path / "out").merge_and_unload()
    one, two = bodies
    torch.testing.assert_close(merged.body.weight, 0.75 * one.body.weight + 0.25 * two.body.weight)
    torch.testing.assert_close(merged.head.weight, torch.cat([one.head.weight, two.head.weight]))
