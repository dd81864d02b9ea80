"""Export to ONNX, torch.export and TorchScript.

The exported network takes uint8 pixels and returns logits and probabilities; normalization is part of it, so
a user only has to resize images. Each file is written to a temporary name, compared with the model on images,
and only then renamed.
"""

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cofima.core.atomic import write_aside
from cofima.core.errors import CofimaError
from cofima.core.extras import import_extra
from cofima.methods.components.adapters import Inserted
from cofima.store.model import Model

INPUT, OUTPUTS = "pixels", ("logits", "probabilities")
TOLERANCE = 1e-3  # relative to the largest logit, or to 1 if that is smaller
ONNX_LIMIT = 2**31 - 2**20  # maximum bytes of one ONNX file
LAST = 2**31
Answer = Callable[[Tensor], Tensor]


class Portable(nn.Module):
    """A model as one module: uint8 pixels [B, 3, stored, stored] in, logits and probabilities out."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.net, self.head = model.method.net, model.method.head()
        self.predict = model.method.predict
        self.temperature = float(model.serving.get("temperature", 1.0))
        self.offsets: Tensor
        self.register_buffer("offsets", model.offset(torch.zeros(len(model.classes))), persistent=False)
        view = model.view
        self.start, self.size = round((view.stored - view.size) / 2), view.size
        self.mean: Tensor
        self.std: Tensor
        for name, color in (("mean", view.mean), ("std", view.std)):
            self.register_buffer(name, 255 * torch.tensor(color).view(1, 3, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Crop the center, normalize, classify."""
        end = self.start + self.size
        images = (pixels[:, :, self.start : end, self.start : end].float() - self.mean) / self.std
        logits = self.predict(images) + self.offsets
        return logits, torch.softmax(logits / self.temperature, dim=1)


@contextmanager
def plain_switches(net: nn.Module) -> Iterator[None]:
    """Turn the switches of adapters into Python values: a traced graph cannot branch on a tensor's value."""
    inserted = [module for module in net.modules() if isinstance(module, Inserted)]
    switches = [module.on for module in inserted]
    for module, switch in zip(inserted, switches, strict=True):
        del module.on
        module.__dict__["on"] = bool(switch)
    try:
        yield
    finally:
        for module, switch in zip(inserted, switches, strict=True):
            del module.__dict__["on"]
            module.register_buffer("on", switch)


def metadata(model: Model) -> dict[str, Any]:
    """Return the metadata of an exported file: classes, preprocessing, origin."""
    view = model.view
    return {
        "classes": model.classes,
        "preprocess": {
            "resize_shorter_side": view.stored,
            "interpolation": "bicubic",
            "antialias": True,
            "center_crop": view.stored,
            "colour": "RGB",
            "inside": {
                "center_crop": view.size,
                "scale": 1 / 255,
                "mean": list(view.mean),
                "std": list(view.std),
            },
        },
        "temperature": float(model.serving.get("temperature", 1.0)),
        "calibrated": "temperature" in model.serving,
        "method": model.method.label,
        "backbone": {"name": model.backbone.name, "sha256": model.backbone.sha256},
        "cofima": version("cofima"),
    }


def as_text(values: dict[str, Any]) -> dict[str, str]:
    """Return metadata as JSON strings under ``cofima.*`` keys, as file headers hold strings only."""
    return {f"cofima.{key}": json.dumps(value, ensure_ascii=False) for key, value in values.items()}


@dataclass(frozen=True)
class Exported:
    """Comparison of an exported file with the model.

    Attributes:
        images: Number of images.
        difference: Largest absolute difference of the logits.
        largest: Largest absolute logit of the model.
    """

    images: int
    difference: float
    largest: float


def to_onnx(model: Model, path: Path, images: Tensor) -> Exported:
    """Write an ONNX file with a dynamic batch size, and check it with onnxruntime."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # else onnxruntime reports each model to its vendor
    onnx, runtime = import_extra("onnx", "onnx"), import_extra("onnxruntime", "onnx")
    import_extra("onnxscript", "onnx")
    if sum(p.numel() * p.element_size() for p in model.method.net.state_dict().values()) > ONNX_LIMIT:
        raise CofimaError(f"{path}: the model is larger than the 2 GB that one ONNX file can hold")

    with write_aside(path) as aside:
        with _tracing(model), _traceable(model, "ONNX"):
            program = torch.onnx.export(
                Portable(model).eval(),
                (images[:2],),
                dynamo=True,
                input_names=[INPUT],
                output_names=list(OUTPUTS),
                dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=LAST)},),
                verbose=False,
            )
        assert program is not None
        proto = program.model_proto
        onnx.helper.set_model_props(proto, as_text(metadata(model)))
        onnx.checker.check_model(proto)
        onnx.save(proto, aside)
        session = runtime.InferenceSession(str(aside), providers=["CPUExecutionProvider"])
        return compare(
            model,
            path,
            images,
            lambda pixels: torch.from_numpy(session.run([OUTPUTS[0]], {INPUT: pixels.numpy()})[0]),
        )


def to_torchscript(model: Model, path: Path, images: Tensor) -> Exported:
    """Write a TorchScript archive that only needs torch; metadata is in its extra file cofima.json."""
    text = json.dumps(metadata(model), ensure_ascii=False)
    with write_aside(path) as aside:
        with _tracing(model), _traceable(model, "TorchScript"):
            traced = torch.jit.trace(  # type: ignore[no-untyped-call]
                Portable(model).eval(), (images[:2],), check_trace=False
            )
            torch.jit.save(torch.jit.freeze(traced), aside, _extra_files={"cofima.json": text})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.jit.load(str(aside), map_location="cpu")  # type: ignore[no-untyped-call]
        return compare(model, path, images, lambda pixels: loaded(pixels)[0])


def to_pt2(model: Model, path: Path, images: Tensor) -> Exported:
    """Write a torch.export program that only needs torch; metadata is in its extra file cofima.json."""
    extra = {"cofima.json": json.dumps(metadata(model), ensure_ascii=False)}
    with write_aside(path) as aside:
        with _tracing(model), _traceable(model, "a program of torch.export"):
            batch = torch.export.Dim("batch", min=1, max=LAST)
            program = torch.export.export(
                Portable(model).eval(), (images[:2],), dynamic_shapes=({0: batch},), strict=False
            )
            torch.export.save(program, aside, extra_files=extra)
            answer = torch.export.load(aside).module()
        return compare(model, path, images, lambda pixels: answer(pixels)[0])


def on_squares(model: Model) -> Model:
    """Set a model's view to square center crops, in place: exported files have a fixed input size."""
    model.view = replace(model.view, whole=0, window=False, shape=None)
    return model


def sample_images(model: Model, count: int = 8) -> tuple[Tensor, str]:
    """Return images for the comparison and their description: images stored in the model, or random ones."""
    kept = model.images
    if kept is not None and len(kept) >= 2 and kept.pixels.ndim == 4:
        return kept.pixels[kept.rows[:count]], "kept in the model"
    chance, side = torch.Generator().manual_seed(0), model.view.stored
    coarse = torch.rand(count, 3, 4, 4, generator=chance)
    smooth = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")
    noise = 0.1 * torch.randn(count, 3, side, side, generator=chance)
    return ((smooth + noise).clamp(0, 1) * 255).to(torch.uint8), "drawn at random"


@torch.inference_mode()
def compare(model: Model, path: Path, images: Tensor, answer: Answer) -> Exported:
    """Compare an exported network with the model, on one image and on a batch: the batch size is dynamic.

    It is called within :func:`write_aside`, so that nothing is written if it raises.
    """
    wanted = model.logits(images)
    with _traceable(model, f"{path.suffix} for any number of images"):
        found = torch.cat([answer(images[:1]), answer(images[1:])])
    difference, largest = float((found - wanted).abs().max()), float(wanted.abs().max())
    if not difference <= TOLERANCE * max(1.0, largest):
        raise CofimaError(
            f"{path}: the logits of the exported network differ from the model's by "
            f"{difference:.2g} (the largest is {largest:.2g}); nothing was written"
        )
    return Exported(len(images), difference, largest)


@contextmanager
def _tracing(model: Model) -> Iterator[None]:
    """Trace in evaluation mode, without gradients and without the tracer's warnings."""
    model.method.net.eval()
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with torch.no_grad(), plain_switches(model.method.net), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger("torch.onnx").setLevel(level)


@contextmanager
def _traceable(model: Model, kind: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, torch.onnx.OnnxExporterError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CofimaError(
            f"{model.method.label} on {model.backbone.name} cannot be written as {kind}: {first}"
        ) from error
