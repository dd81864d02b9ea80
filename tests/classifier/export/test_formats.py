"""An exported file predicts what the model predicts, in another program, for any batch size."""

import json
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import timm.data
import torch
from PIL import Image
from safetensors import safe_open

from cofima import methods
from cofima.classifier.classifier import Classifier
from cofima.classifier.export import formats, plain_timm
from cofima.classifier.export.formats import Portable
from cofima.core.errors import CofimaError
from cofima.store.model import Model, load_model

PAGE = Path(__file__).parents[3] / "docs" / "using_a_model.md"
NOT_PLAIN = {
    "l2p": "prompts",
    "dual_prompt": "prompts",
    "ranpac": "random projection",
    "fecam": "correlation matrix",
}


def some(*quick: str) -> list[Any]:
    """Return all methods, of which only these are quick enough for every day."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in methods.names()]


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Any:
    """Return a function that gives a model of a method, loaded from its folder."""
    made: dict[str, Path] = {}

    def model(method: str, **options: Any) -> Model:
        name = f"{method}{options}"
        if name not in made:
            made[name] = tmp_path_factory.mktemp("exported") / "model"
            config = tiny.config(method, train={"epochs": 1}, options=options)
            tiny.run(made[name], config, tiny.stream((2, 1), per_class=6))
        return load_model(made[name], where="cpu")

    return model


def images(count: int) -> torch.Tensor:
    return torch.randint(256, (count, 3, 16, 16), generator=torch.Generator().manual_seed(1)).byte()


def test_one_network_holds_crop_normalization_head_and_temperature(learned: Any) -> None:
    model = learned("cofima")
    model.serving["temperature"] = 2.0
    with torch.inference_mode():
        logits, chances = Portable(model).eval()(images(5))
    torch.testing.assert_close(logits, model.logits(images(5)))
    torch.testing.assert_close(chances, torch.softmax(model.logits(images(5)) / 2, dim=1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.load.*:FutureWarning")
@pytest.mark.parametrize("method", some("cofima", *NOT_PLAIN))
def test_torchscript_says_what_the_model_says(method: str, learned: Any, tmp_path: Path) -> None:
    model = learned(method)
    done = formats.to_torchscript(model, tmp_path / "a.pt", images(3))
    told = {"cofima.json": ""}
    loaded = torch.jit.load(str(tmp_path / "a.pt"), _extra_files=told)
    for count in (1, 7):
        torch.testing.assert_close(
            loaded(images(count))[0], model.logits(images(count)), rtol=1e-4, atol=1e-5
        )
    facts = json.loads(told["cofima.json"])
    assert facts["classes"] == model.classes
    assert facts["preprocess"]["resize_shorter_side"] == model.view.stored
    assert facts["preprocess"]["inside"]["mean"] == list(model.view.mean)
    assert done.difference < 1e-3
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("method", some("cofima"))
def test_a_program_of_torch_export_says_what_the_model_says(
    method: str, learned: Any, tmp_path: Path
) -> None:
    model = learned(method)
    model.serving["temperature"] = 2.0
    done = formats.to_pt2(model, tmp_path / "a.pt2", images(3))
    told = {"cofima.json": ""}
    program = torch.export.load(tmp_path / "a.pt2", extra_files=told).module()
    for count in (1, 2, 7):
        with torch.no_grad():
            logits, chances = program(images(count))
        wanted = model.logits(images(count))
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(chances, torch.softmax(wanted / 2, dim=1), rtol=1e-4, atol=1e-5)
    assert json.loads(told["cofima.json"])["classes"] == model.classes
    assert done.difference < 1e-3
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt2"]


@pytest.mark.parametrize("method", some("cofima", "ranpac"))
def test_timm_loads_the_folder_for_the_hub_or_the_reason_is_said(
    method: str, learned: Any, tmp_path: Path
) -> None:
    model, folder = learned(method), tmp_path / "parts"
    if method in NOT_PLAIN:
        with pytest.raises(CofimaError, match=NOT_PLAIN[method]):
            plain_timm.to_timm_hub(model, folder, images(2))
        assert not list(tmp_path.iterdir())
        return
    plain_timm.to_timm_hub(model, folder, images(2))
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    net = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.inference_mode():
        logits = net(model.view.test(images(4)))
    torch.testing.assert_close(logits, model.logits(images(4)), rtol=1e-4, atol=1e-5)
    assert net.pretrained_cfg["label_names"] == model.classes
    data = timm.data.resolve_model_data_config(net)
    assert tuple(data["input_size"]) == (3, model.backbone.size, model.backbone.size)
    assert data["mean"] == pytest.approx(model.backbone.mean)
    assert "library_name: timm" in (folder / "README.md").read_text("utf-8")
    with pytest.raises(CofimaError, match="not an empty folder"):
        plain_timm.to_timm_hub(model, folder, images(2))


@pytest.mark.parametrize("method", some("cofima", "bic", *NOT_PLAIN))
def test_plain_timm_loads_the_weights_or_the_reason_is_said(
    method: str, learned: Any, tmp_path: Path
) -> None:
    model, path = learned(method), tmp_path / "a.safetensors"
    if method in NOT_PLAIN:
        with pytest.raises(CofimaError, match=NOT_PLAIN[method]):
            plain_timm.to_timm(model, path, images(2))
        assert not list(tmp_path.iterdir())
        return
    plain_timm.to_timm(model, path, images(2))
    net = timm.create_model("vit_test", num_classes=3, checkpoint_path=str(path)).eval()
    with torch.inference_mode():
        logits = net(model.view.test(images(4)))
    torch.testing.assert_close(logits, model.logits(images(4)), rtol=1e-4, atol=1e-5)
    with safe_open(path, "pt") as file:
        told = file.metadata()
    assert json.loads(told["cofima.classes"]) == model.classes
    assert json.loads(told["cofima.timm"])["arguments"]["num_classes"] == 3


def test_adapters_in_the_backbone_are_not_plain_either(learned: Any) -> None:
    model = learned("ranpac", petl="adapter")
    model.method.net.head = model.method.net.head.__class__.__mro__[1](16, [2, 1])  # a plain head
    assert "blocks.0.adapter" in str(plain_timm.not_plain(model))


@pytest.mark.parametrize("method", some())
def test_onnxruntime_says_what_the_model_says(
    method: str,
    learned: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not all(map(find_spec, ("onnxscript", "onnx", "onnxruntime"))):
        pytest.skip("needs cofima[onnx]")
    model, path = learned(method), tmp_path / "a.onnx"
    model.serving["temperature"] = 2.0
    formats.to_onnx(model, path, images(3))
    onnx, runtime = import_module("onnx"), import_module("onnxruntime")  # as the export imported them
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (taken,) = session.get_inputs()
    assert (taken.name, taken.type, taken.shape[1:]) == ("pixels", "tensor(uint8)", [3, 16, 16])
    for count in (1, 7):
        logits, chances = session.run(None, {"pixels": images(count).numpy()})
        wanted = model.logits(images(count))
        np.testing.assert_allclose(logits, wanted.numpy(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(chances, torch.softmax(wanted / 2, dim=1).numpy(), rtol=1e-4, atol=1e-4)
    if method == "cofima":
        the_page_s_example_says_the_same(model, path, capsys, monkeypatch)
    told = {entry.key: json.loads(entry.value) for entry in onnx.load(path).metadata_props}
    assert told["cofima.classes"] == model.classes
    assert told["cofima.preprocess"]["inside"]["std"] == list(model.view.std)
    assert told["cofima.temperature"] == 2.0
    assert not [file.name for file in tmp_path.iterdir() if file.name.startswith(".")]


def the_page_s_example_says_the_same(model: Model, path: Path, capsys: Any, monkeypatch: Any) -> None:
    (text,) = re.findall(r"^```py\n(import json.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(path.parent)
    (path.parent / "parts.onnx").write_bytes(path.read_bytes())
    photo = Image.fromarray(images(1)[0].permute(1, 2, 0).numpy()).resize((70, 40))
    photo.save("photo.jpg", quality=95)
    exec(compile(text, "using_a_model.md", "exec"), {})
    name, chance = capsys.readouterr().out.rsplit(maxsplit=1)
    best = Classifier(model).predict("photo.jpg")[0]
    assert name == best.label
    assert abs(float(chance) - best.probability) < 0.02


def test_a_file_that_answers_otherwise_is_not_kept(
    learned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = learned("seq_ft"), tmp_path / "a.pt"
    path.write_text("the file before")
    plain = Portable.forward
    monkeypatch.setattr(Portable, "forward", lambda self, x: tuple(y + 1 for y in plain(self, x)))
    with pytest.raises(CofimaError, match="differ from the model's by"):
        formats.to_torchscript(model, path, images(2))
    assert path.read_text() == "the file before"
    assert len(list(tmp_path.iterdir())) == 1


def test_switches_of_adapters_are_as_before_after_an_export(learned: Any, tmp_path: Path) -> None:
    model = learned("ranpac", petl="adapter")
    before = set(model.method.net.state_dict())
    formats.to_torchscript(model, tmp_path / "a.pt", images(2))
    assert set(model.method.net.state_dict()) == before
    assert torch.is_tensor(model.method.inserted[0].on)


def test_a_missing_package_names_the_extra(
    learned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(CofimaError, match=r"pip install 'cofima\[onnx\]'"):
        formats.to_onnx(learned("seq_ft"), tmp_path / "a.onnx", images(2))


def test_kept_images_are_compared_on_before_drawn_ones(learned: Any) -> None:
    model = learned("seq_ft")
    drawn, source = formats.sample_images(model)
    assert (tuple(drawn.shape), source) == ((8, 3, 16, 16), "drawn at random")
    from cofima.data.image_set import image_set

    model.images = image_set(images(3), torch.tensor([0, 1, 2]))
    kept, source = formats.sample_images(model)
    assert torch.equal(kept, images(3))
    assert source == "kept in the model"
