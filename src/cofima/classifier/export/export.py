"""A model as a file for other programs: ONNX and TorchScript.

Each file is written aside, compared with the model on images, and only then given its name.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from cofima.classifier.export.torch import INPUT, OUTPUTS, Portable, as_text, facts, settled
from cofima.core.atomic import write_aside
from cofima.core.errors import CofimaError
from cofima.core.extras import import_extra
from cofima.store.model import Model

TOLERANCE = 1e-3  # of the largest logit, or of 1 where that is smaller
ONNX_LIMIT = 2**31 - 2**20  # bytes that one ONNX file can hold
LAST = 2**31
Answer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
    """A file, and how far its logits are from the model's on the images that were compared."""

    path: Path
    images: int
    difference: float
    largest: float


def to_onnx(model: Model, path: Path, images: Tensor) -> Exported:
    """Write an ONNX file that takes any number of uint8 images; checked with onnxruntime."""
    onnx, runtime = import_extra("onnx", "onnx"), import_extra("onnxruntime", "onnx")
    import_extra("onnxscript", "onnx")
    if sum(p.numel() * p.element_size() for p in model.method.net.state_dict().values()) > ONNX_LIMIT:
        raise CofimaError(f"{path}: the model is larger than the 2 GB that one ONNX file can hold")

    def write(aside: Path) -> None:
        with _still(model), _traceable(model, "ONNX"):
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
        onnx.helper.set_model_props(proto, as_text(facts(model)))
        onnx.checker.check_model(proto)
        onnx.save(proto, aside)

    def answer(aside: Path) -> Answer:
        session = runtime.InferenceSession(str(aside), providers=["CPUExecutionProvider"])
        return lambda pixels: torch.from_numpy(session.run([OUTPUTS[0]], {INPUT: pixels.numpy()})[0])

    return write_compared(model, path, images, write, answer)


def to_torchscript(model: Model, path: Path, images: Tensor) -> Exported:
    """Write a TorchScript archive that needs torch alone; what is told with it is its file cofima.json."""
    told = json.dumps(facts(model), ensure_ascii=False)

    def write(aside: Path) -> None:
        with _still(model), _traceable(model, "TorchScript"):
            traced = torch.jit.trace(  # type: ignore[no-untyped-call]
                Portable(model).eval(), (images[:2],), check_trace=False
            )
            torch.jit.save(torch.jit.freeze(traced), aside, _extra_files={"cofima.json": told})

    def answer(aside: Path) -> Answer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.jit.load(str(aside), map_location="cpu")  # type: ignore[no-untyped-call]
        return lambda pixels: loaded(pixels)[0]

    return write_compared(model, path, images, write, answer)


def on_squares(model: Model) -> Model:
    """Let a model see square centres of images, whatever form its own training images were kept in."""
    model.view = replace(model.view, whole=0, window=False, shape=None)
    return model


def sample_images(model: Model, count: int = 8) -> tuple[Tensor, str]:
    """Return images to compare on, and what they are: those kept in the model, or drawn ones."""
    kept = model.images
    if kept is not None and len(kept) >= 2 and kept.pixels.ndim == 4:
        return kept.pixels[kept.rows[:count]], "kept in the model"
    chance, side = torch.Generator().manual_seed(0), model.view.stored
    coarse = torch.rand(count, 3, 4, 4, generator=chance)
    smooth = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")
    noise = 0.1 * torch.randn(count, 3, side, side, generator=chance)
    return ((smooth + noise).clamp(0, 1) * 255).to(torch.uint8), "drawn by chance"


def write_compared(
    model: Model, path: Path, images: Tensor, write: Callable[[Path], None], answer: Callable[[Path], Answer]
) -> Exported:
    """Write aside, compare with the model image by image and as a batch, then rename."""
    with write_aside(path) as aside:
        write(aside)
        return _compare(model, path, images, answer(aside))


@torch.inference_mode()
def _compare(model: Model, path: Path, images: Tensor, answer: Answer) -> Exported:
    """Compare logits for one image and for all at once, so that the number of images is seen to be free."""
    wanted = model.logits(images)
    with _traceable(model, f"{path.suffix} for any number of images"):
        found = torch.cat([answer(images[:1]), answer(images[1:])])
    difference, largest = float((found - wanted).abs().max()), float(wanted.abs().max())
    if not difference <= TOLERANCE * max(1.0, largest):
        raise CofimaError(
            f"{path}: the exported network answers otherwise than the model (logits differ by "
            f"{difference:.2g}, the largest is {largest:.2g}); nothing was written"
        )
    return Exported(path, len(images), difference, largest)


@contextmanager
def _still(model: Model) -> Iterator[None]:
    """Trace in evaluation mode, with no gradient, and without the tracers' remarks to developers."""
    model.method.net.eval()
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with torch.no_grad(), settled(model.method.net), warnings.catch_warnings():
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
