"""The model: a method with its network and state, saved to and loaded from a model folder."""

from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import save_file
from torch import Tensor

from cofima import methods
from cofima.core import plugins
from cofima.core.errors import CofimaError, problems
from cofima.core.lock import folder_lock
from cofima.core.progress import SILENT, Progress
from cofima.core.seeds import Seeds
from cofima.data.image_set import ImageSet, image_set
from cofima.data.sources.plugin import plugin_datasets
from cofima.data.transforms import View
from cofima.methods import Method
from cofima.models.backbone import build_like
from cofima.models.info import BackboneFacts
from cofima.models.net import Net
from cofima.store import model_folder
from cofima.store.config import Config
from cofima.store.generation import Generation
from cofima.store.held_out import HeldOut, no_images
from cofima.store.history import HistoryRow, describe_errors
from cofima.store.record import BACKBONE, CONFIG, FEATURES, HEAD, IMAGES, STATE, MethodFacts, Record
from cofima.training import device
from cofima.training.context import Context

LARGE = 200_000_000  # bytes; a message announces the writing of larger models
_FACTS, _VIEW = TypeAdapter(BackboneFacts), TypeAdapter(View)


@dataclass
class Model:
    """A method with its network, its classes and its history.

    Attributes:
        config: The resolved configuration.
        backbone: Facts about the backbone: name, input size, digest of the pre-trained weights.
        view: Preprocessing of images.
        method: The method, with the network and its state.
        planned: Number of tasks planned.
        data: Facts about the training images.
        tasks: Class names of each task.
        history: One row per change, oldest first.
        serving: Facts for prediction (calibration, distances); JSON-serializable.
        images: Held-out images that the user asked to store, or None.
        held_out: Stored features of held-out images, or None for the model of a run.
        generation: The generation it was loaded from or saved as, or None.
    """

    config: Config
    backbone: BackboneFacts
    view: View
    method: Method
    planned: int
    data: dict[str, Any] = field(default_factory=dict)
    tasks: list[tuple[str, ...]] = field(default_factory=list)
    history: list[HistoryRow] = field(default_factory=list)
    serving: dict[str, Any] = field(default_factory=dict)
    images: ImageSet | None = None
    held_out: HeldOut | None = None
    generation: Generation | None = None

    @property
    def width(self) -> int:
        """Number of features."""
        return self.method.net.head.features

    @property
    def kept(self) -> HeldOut:
        """Stored features of held-out images; empty if there are none."""
        return no_images(self.width) if self.held_out is None else self.held_out

    @property
    def classes(self) -> list[str]:
        """Names of all learned classes, in the order of the logits."""
        return [name for task in self.tasks for name in task]

    @torch.inference_mode()
    def logits(self, pixels: Tensor) -> Tensor:
        """Return the logits of uint8 images in the view's pixel format, on the CPU."""
        self.method.net.eval()
        logits = self.method.predict(self.view.test(pixels.to(self.method.context.device)))
        return self.offset(logits.float().cpu())

    def offset(self, logits: Tensor) -> Tensor:
        """Add the calibration's offset of each class to logits on the CPU."""
        offsets = self.serving.get("offsets")
        return logits if offsets is None else logits + torch.tensor(offsets)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of backbone and head under timm's names."""
        return self.method.net.backbone.state_dict() | self.head_weights()

    def head_weights(self) -> dict[str, Tensor]:
        """Return the weights of the head that predicts under timm's names."""
        return {f"{self.backbone.classifier}.{k}": v for k, v in self.method.head().flat().items()}


def attach(
    config: Config, facts: BackboneFacts, view: View, net: Net, planned: int, progress: Progress
) -> Model:
    """Build the method on a network, and return a model without classes."""
    method = methods.build(config.method, config.options)
    where = device.choose(config.device)
    if config.train.precision == "bf16" and where.type != "cuda":
        raise CofimaError(
            f"train.precision = bf16: needs a GPU, and this run is on the {where.type}; use fp32"
        )
    method.setup(net.to(where), Context(view, config.train, Seeds(config.seed), where, planned, progress))
    return Model(config, facts, view, method, planned)


def save_model(model: Model, folder: Path, progress: Progress = SILENT, *, replaces: bool = False) -> None:
    """Write the next generation of a model folder, and make it the current one.

    Raise if the folder holds another model, or has changed since this one was loaded.

    Args:
        model: The model; its ``generation`` is set to the one written.
        folder: The model folder.
        progress: Receives a message for large models.
        replaces: Replace the current generation: undo returns to the one before it.
    """
    backbone, head = _plain(model.method.net.backbone.state_dict()), _plain(model.head_weights())
    state = _plain(model.method.state())
    size = sum(value.nbytes for part in (backbone, head, state) for value in part.values())
    if size > LARGE:
        progress.say(f"writing {size / 1e6:,.0f} MB to {folder}")
    with folder_lock(folder):
        model_folder.check_replaceable(folder, model.generation)
        with model_folder.write(folder, _record(model), model.history, replaces=replaces) as aside:
            save_file(backbone, aside / BACKBONE, {"format": "pt"})
            save_file(head, aside / HEAD, {"format": "pt"})
            save_file(state, aside / STATE, {"format": "pt"})
            if model.images is not None and len(model.images):
                kept = {"pixels": model.images.pixels[model.images.rows], "labels": model.images.labels}
                save_file(kept, aside / IMAGES)
            if len(model.kept):
                save_file(model.kept.tensors(), aside / FEATURES)
        model.generation = model_folder.read(folder)


def load_model(
    folder: str | Path,
    *,
    where: str = "auto",
    progress: Progress = SILENT,
    generation: Path | None = None,
    any_size: bool = False,
) -> Model:
    """Load a model, ready to predict or to learn the next task; every file is verified.

    Args:
        folder: The model folder.
        where: Name of the device.
        progress: Receives progress reports.
        generation: Path of a generation other than the current one.
        any_size: Accept images of any size, even if the training images had a smaller, fixed one.
    """
    folder = Path(folder)

    def load(read: Generation) -> Model:
        return _load(folder, read, where, any_size, progress)

    if generation is not None:
        return load(model_folder.read(folder, generation))
    return model_folder.read_with(folder, load)


def _load(folder: Path, read: Generation, where: str, any_size: bool, progress: Progress) -> Model:
    plugins.require(folder, read.record.plugins)
    changed: dict[str, Any] = {"config": read.record.config | {"device": where}}
    if any_size:
        changed["preprocess"] = read.record.preprocess | {"shape": None}
    record, weights, state = read.record.model_copy(update=changed), read.weights(), read.state()
    history, images, features = read.history(), read.images(), read.features()
    try:
        model = _build(record, weights, state, progress)
        if images is not None:
            model.images = image_set(images["pixels"], images["labels"])
        if features is not None:
            model.held_out = HeldOut(**features)
    except CofimaError:
        raise
    except ValidationError as error:
        raise problems(f"model folder {folder}", describe_errors(f"{read.path / CONFIG}", error)) from error
    except Exception as error:  # the hashes are right, so the files were written inconsistent
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise CofimaError(f"model folder {folder}: the files in {read.name} do not fit: {reason}") from error
    model.history, model.generation = history, read
    return model


def rebuild_model(
    model: Model,
    weights: dict[str, Tensor],
    state: dict[str, Tensor],
    tasks: list[tuple[str, ...]],
    progress: Progress = SILENT,
) -> Model:
    """Return a model like this one, with other weights, method state and tasks."""
    record = _record(model).model_copy(update={"tasks": tasks}, deep=True)
    made = _build(record, weights, state, progress)
    made.history, made.images, made.held_out = deepcopy(model.history), model.images, model.held_out
    made.generation = model.generation
    return made


def copy_model(model: Model, progress: Progress = SILENT) -> Model:
    """Return a deep copy: it predicts and learns the same, and shares no weights."""
    weights, state = (
        {key: value.clone() for key, value in _plain(part).items()}
        for part in (model.weights(), model.method.state())
    )
    return rebuild_model(model, weights, state, list(model.tasks), progress)


def _build(record: Record, weights: dict[str, Tensor], state: dict[str, Tensor], progress: Progress) -> Model:
    """Build the network and the method that a record describes, and load weights and state."""
    config = Config.model_validate(record.config)
    facts = _FACTS.validate_python(record.backbone)
    view = _VIEW.validate_python(record.preprocess)
    if view.size != facts.size:
        raise ValueError(f"images of {view.size} px, for a network of {facts.size} px")
    empty = build_like(facts)
    net = Net(empty, facts.features, [len(task) for task in record.tasks])
    model = attach(config, facts, view, net, record.planned_tasks, progress)
    model.tasks = [tuple(task) for task in record.tasks]
    model.data, model.serving = record.data, record.serving
    head = {key: weights[f"{facts.classifier}.{key}"] for key in ("weight", "bias")}
    body = {k: v for k, v in weights.items() if k not in {f"{facts.classifier}.{key}" for key in head}}
    net.backbone.load_state_dict(body)  # after attach: a method may add weights (adapters) to the backbone
    model.method.load_head(**head)
    model.method.restore(state)
    net.eval()
    return model


def method_facts(kind: type[Method]) -> MethodFacts:
    """Return the facts about a method that a model folder records."""
    return MethodFacts(label=kind.label, all_at_once=kind.all_at_once, keeps_images=kind.keeps_images)


def _record(model: Model) -> Record:
    dataset = plugin_datasets().get(model.config.dataset)
    needed = [model.config.method, *([dataset.plugin] if dataset else [])]
    return Record(
        method=method_facts(type(model.method)),
        config=model.config.model_dump(mode="json"),
        backbone=model.backbone.as_json(),
        preprocess=asdict(model.view),
        data=model.data,
        tasks=[list(task) for task in model.tasks],
        planned_tasks=model.planned,
        serving=model.serving,
        plugins=plugins.records(needed),
    )


def _plain(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach().cpu().contiguous() for key, value in weights.items()}
