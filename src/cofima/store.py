"""The model folder: a classifier that has learned some tasks, and can go on learning.

One folder per generation (after each task), complete in itself; ``CURRENT`` names the one in force
and is replaced last, so that a crash never mixes two.
"""

import hashlib
import json
import os
import platform
import shutil
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cofima import methods, plugins
from cofima.config import Config
from cofima.data.images import ImageSet
from cofima.data.own import own
from cofima.data.views import View
from cofima.errors import CofimaError, problems
from cofima.files import sync, write_text
from cofima.lock import alone
from cofima.methods import Method
from cofima.models.backbone import BackboneFacts, build_empty
from cofima.models.net import Net
from cofima.progress import SILENT, Progress
from cofima.seeds import Seeds
from cofima.training import device
from cofima.training.sgd import Context

FORMAT = 1
WEIGHTS, STATE, HISTORY, CONFIG, CURRENT = (
    "model.safetensors",
    "state.safetensors",
    "history.jsonl",
    "config.json",
    "CURRENT",
)
INFLIGHT = "inflight"  # the task that is being learnt, as far as it is
IMAGES = "images.safetensors"  # only where the user asked for images to be kept
CHANGED = "its content is not what was written (sha256 differs)"
LARGE = 200_000_000  # bytes; writing more than this is announced


@dataclass
class Model:
    """A method with its network, and what it has learned so far.

    Attributes:
        serving: What a classifier in use needs beside it (calibration, distances); JSON-able.
        images: Images that were held out of the training and that the user asked to keep, or none.
    """

    config: Config
    backbone: BackboneFacts
    view: View
    method: Method
    planned: int
    data: dict[str, Any] = field(default_factory=dict)
    tasks: list[tuple[str, ...]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    serving: dict[str, Any] = field(default_factory=dict)
    images: ImageSet | None = None

    @property
    def classes(self) -> list[str]:
        """Names of all classes learned, in the order of the logits."""
        return [name for task in self.tasks for name in task]

    def see_photographs(self) -> None:
        """Take images of any size from now on, also where it learned from images that are stored small."""
        if self.view.shape is not None:
            self.view = replace(self.view, shape=None)
            self.method.context = replace(self.method.context, view=self.view)

    @torch.inference_mode()
    def logits(self, pixels: Tensor) -> Tensor:
        """Return logits for uint8 images [B, 3, stored, stored] as :func:`cofima.data.images.fit` makes."""
        self.method.net.eval()
        return self.method.predict(self.view.test(pixels.to(self.method.context.device))).float().cpu()

    def weights(self) -> dict[str, Tensor]:
        """Return backbone and predicting head under timm's own names."""
        head = {f"{self.backbone.classifier}.{k}": v for k, v in self.method.head().flat().items()}
        return self.method.net.backbone.state_dict() | head


def attach(
    config: Config, facts: BackboneFacts, view: View, net: Net, planned: int, progress: Progress
) -> Model:
    """Join configuration, network and method into a model that has learned nothing yet."""
    method = methods.build(config.method, config.options)
    where = device.choose(config.device)
    if config.train.precision == "bf16" and where.type != "cuda":
        raise CofimaError(
            f"train.precision = bf16: needs a GPU, and this run is on the {where.type}; use fp32"
        )
    method.setup(net.to(where), Context(view, config.train, Seeds(config.seed), where, planned, progress))
    return Model(config, facts, view, method, planned)


def save(model: Model, folder: Path, progress: Progress = SILENT) -> None:
    """Write the next generation, then point to it; the one before stays until the next call."""
    with alone(folder):
        _save(model, folder, progress)


def _save(model: Model, folder: Path, progress: Progress) -> None:
    before = current(folder)
    name = f"{len(model.tasks) if before is None else int(before.name) + 1:04d}"
    aside = folder / f".{name}.{os.getpid()}"
    weights, state = _plain(model.weights()), _plain(model.method.state())
    size = sum(v.numel() * v.element_size() for v in (weights | state).values())
    if size > LARGE:
        progress.say(f"writing {size / 1e6:,.0f} MB to {folder / name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        save_file(weights, aside / WEIGHTS, {"format": "pt"})
        save_file(state, aside / STATE, {"format": "pt"})
        if model.images is not None and len(model.images):
            kept = {"pixels": model.images.pixels[model.images.rows], "labels": model.images.labels}
            save_file(kept, aside / IMAGES)
        (aside / HISTORY).write_text("".join(json.dumps(row) + "\n" for row in model.history), "utf-8")
        seal(aside, _said(model))
        for file in (*aside.iterdir(), aside):
            sync(file)
        if _ours(folder / name):
            shutil.rmtree(folder / name)  # left by a crash before CURRENT was replaced
        aside.rename(folder / name)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CofimaError(
            f"{folder}: {name} could not be written ({error}); earlier states are kept"
        ) from error
    write_text(folder / CURRENT, name + "\n")
    shutil.rmtree(folder / INFLIGHT, ignore_errors=True)  # it went out from the state before
    if not model.config.keep_checkpoints:
        _prune(folder, name)


def refuse_place(folder: Path) -> None:
    """Refuse a folder that cannot be written, or where a generation would meet what is not ours."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise CofimaError(f"{folder} cannot be written: {there} is not a folder that may be written to")
    foreign = [d.name for d in folder.glob("[0-9]" * 4) if not _ours(d)] if there == folder else []
    if foreign:
        raise CofimaError(
            f"{folder} holds {', '.join(sorted(foreign))}, and models are kept under such names: "
            "give another folder, or a new one inside it"
        )


def refuse_other(folder: Path, mine: Path | None) -> None:
    """Refuse a folder that cannot be written, or that holds another model or a newer state than mine."""
    refuse_place(folder)
    there = current(folder)
    if there is None:
        return
    if mine is None or mine.resolve().parent != folder.resolve():
        raise CofimaError(
            f"{folder} holds a model already: give another folder, or extend it (cofima extend)"
        )
    if there != mine:
        raise CofimaError(f"{folder} has changed since it was loaded ({mine.name} then, {there.name} now)")


def current(folder: Path) -> Path | None:
    """Return the generation in force, or None where nothing has been learned yet."""
    pointer = folder / CURRENT
    if not pointer.is_file():
        return None
    name = pointer.read_text("utf-8", errors="replace").strip()
    if not (name.isdigit() and (folder / name).is_dir()):
        raise _damaged(folder, name, [f"{pointer} names '{name}', which is not there"])
    return folder / name


def finished(folder: Path) -> bool:
    """Tell whether a folder has learned all that was planned, without reading its weights."""
    generation = current(folder)
    if generation is None:
        return False
    kept = _read_config(folder, generation)
    return len(kept["tasks"]) >= int(kept["planned_tasks"])


def opened(folder: Path, generation: Path | None = None) -> tuple[Path, dict[str, Any]]:
    """Return a generation (else the one in force) and its config.json, checked file by file; load nothing."""
    generation = generation or current(folder)
    if generation is None:
        raise not_a_model(folder)
    kept = _read_config(folder, generation)
    for name in (WEIGHTS, STATE, HISTORY, *([IMAGES] if IMAGES in kept["files"] else [])):
        _verify(folder, generation, name, kept["files"])
    return generation, kept


def load(
    folder: str | Path,
    *,
    where: str = "auto",
    progress: Progress = SILENT,
    generation: Path | None = None,
) -> Model:
    """Read a model back, checked file by file, ready to predict or to learn the next task.

    It is the generation in force, unless another one of the folder is given.
    """
    generation, kept = opened(Path(folder), generation)
    plugins.refuse_missing(Path(folder), kept.get("plugins", []))
    weights, state = (load_file(generation / name) for name in (WEIGHTS, STATE))
    images = load_file(generation / IMAGES) if IMAGES in kept["files"] else None
    config = Config.model_validate(kept["config"] | {"device": where})
    facts = TypeAdapter(BackboneFacts).validate_python(kept["backbone"])
    view = TypeAdapter(View).validate_python(kept["preprocess"])
    tasks = [tuple(task) for task in kept["tasks"]]
    model = _empty(config, facts, view, tasks, kept["planned_tasks"], progress)
    model.data, model.serving = kept["data"], kept.get("serving", {})
    model.history = [json.loads(line) for line in (generation / HISTORY).read_text("utf-8").splitlines()]
    if images is not None:
        model.images = ImageSet(images["pixels"], torch.arange(len(images["labels"])), images["labels"])
    return _fill(model, weights, state)


def rebuild(
    model: Model,
    weights: dict[str, Tensor],
    state: dict[str, Tensor],
    tasks: list[tuple[str, ...]],
    progress: Progress = SILENT,
) -> Model:
    """Return a model like this one, of these tasks, with other weights and another state of the method."""
    made = _empty(model.config, model.backbone, model.view, tasks, model.planned, progress)
    made.data, made.history = deepcopy(model.data), deepcopy(model.history)
    made.serving, made.images = deepcopy(model.serving), model.images
    return _fill(made, weights, state)


def copy(model: Model, progress: Progress = SILENT) -> Model:
    """Return a model that predicts and learns the same, and shares no weights with this one."""
    weights, state = (
        {key: value.clone() for key, value in _plain(part).items()}
        for part in (model.weights(), model.method.state())
    )
    return rebuild(model, weights, state, list(model.tasks), progress)


def undo(folder: Path) -> tuple[Path, Path]:
    """Put the generation before into force again; return the one left, and the one in force now."""
    if current(folder) is None:
        raise not_a_model(folder)
    with alone(folder):
        return _undo(folder)


def _undo(folder: Path) -> tuple[Path, Path]:
    now = current(folder)
    assert now is not None
    before = [generation for generation in _generations(folder) if generation.name < now.name]
    if not before:
        raise CofimaError(f"{folder}: there is nothing to undo; no state before {now.name} is kept")
    kept = _read_config(folder, before[-1])
    for name in kept["files"]:
        _verify(folder, before[-1], name, kept["files"])
    write_text(folder / CURRENT, before[-1].name + "\n")
    return now, before[-1]


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Return the history of a model folder, without reading its weights."""
    generation = current(folder)
    if generation is None:
        raise not_a_model(folder)
    _verify(folder, generation, HISTORY, _read_config(folder, generation)["files"])
    return [json.loads(line) for line in (generation / HISTORY).read_text("utf-8").splitlines()]


def classes_of(generation: Path) -> list[str]:
    """Return the names of the classes of a generation, without reading its weights."""
    return [name for task in _read_config(generation.parent, generation)["tasks"] for name in task]


def not_a_model(folder: Path) -> CofimaError:
    """Return what to say of a folder that holds no model."""
    reason = f"it has no file {CURRENT}" if folder.is_dir() else "there is no such folder"
    return CofimaError(f"{folder} is not a model folder: {reason}")


def _empty(
    config: Config,
    facts: BackboneFacts,
    view: View,
    tasks: list[tuple[str, ...]],
    planned: int,
    progress: Progress,
) -> Model:
    """Build a network and a method that know these tasks, for weights that come next."""
    empty = build_empty(facts.name, facts.size, facts.final_norm)
    net = Net(empty, facts.features, [len(task) for task in tasks])
    model = attach(config, facts, view, net, planned, progress)
    model.tasks = tasks
    return model


def _fill(model: Model, weights: dict[str, Tensor], state: dict[str, Tensor]) -> Model:
    """Put backbone, predicting head and state in place."""
    net, name = model.method.net, model.backbone.classifier
    head = {key: weights[f"{name}.{key}"] for key in ("weight", "bias")}
    own = {f"{name}.{key}" for key in head}
    # the method has added what it adds to the network, so all names are there
    net.backbone.load_state_dict({k: v for k, v in weights.items() if k not in own})
    net.head.load_flat(**head)
    model.method.restore(state)
    net.eval()
    return model


def seal(generation: Path, said: dict[str, Any]) -> None:
    """Write config.json: what is said of the model, format, versions, and the sha256 of the other files."""
    said = {"format": FORMAT, **said}
    said["versions"] = {name: version(name) for name in ("cofima", "torch", "timm", "numpy")}
    said["versions"]["python"] = platform.python_version()
    there = [name for name in (WEIGHTS, STATE, HISTORY, IMAGES) if (generation / name).is_file()]
    said["files"] = {name: _sha256(generation / name) for name in there}
    text = json.dumps(said | {"sha256": digest(said)}, indent=2)
    (generation / CONFIG).write_text(text + "\n", "utf-8")


def _said(model: Model) -> dict[str, Any]:
    return {
        "label": model.method.label,
        "config": model.config.model_dump(mode="json"),
        "backbone": model.backbone.as_json(),
        "preprocess": asdict(model.view),
        "data": model.data,
        "tasks": [list(task) for task in model.tasks],
        "serving": model.serving,
        "planned_tasks": model.planned,
        **_plugins(model.config),
    }


def _plugins(config: Config) -> dict[str, Any]:
    """Name the files outside the package that a model was made with; nothing where there are none."""
    dataset = own().get(config.dataset)
    needed = plugins.said([config.method, *([dataset.plugin] if dataset else [])])
    return {"plugins": needed} if needed else {}


def _read_config(folder: Path, generation: Path) -> dict[str, Any]:
    try:
        kept: dict[str, Any] = json.loads((generation / CONFIG).read_text("utf-8"))
        written, newer = kept.pop("sha256", None), int(kept["format"]) > FORMAT
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, generation.name, [f"{generation / CONFIG}: unreadable ({error})"]) from error
    if newer:
        raise CofimaError(f"{folder} was written by a newer cofima (format {kept['format']}): update cofima")
    if written != digest(kept):
        raise _damaged(folder, generation.name, [f"{generation / CONFIG}: {CHANGED}"])
    return kept


def _verify(folder: Path, generation: Path, name: str, files: dict[str, str]) -> None:
    path = generation / name
    if not path.is_file():
        raise _damaged(folder, generation.name, [f"{path}: missing"])
    if _sha256(path) != files.get(name):
        raise _damaged(folder, generation.name, [f"{path}: {CHANGED}"])


def _damaged(folder: Path, name: str, found: list[str]) -> CofimaError:
    others = [g.name for g in _generations(folder) if g.name < name or not name.isdigit()]
    advice = (
        f"the state before, {others[-1]}, is kept: put its name into {folder / CURRENT} to go back"
        if others
        else "there is no state before it"
    )
    return problems(f"model folder {folder}", [*found, advice])


def _generations(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]" * 4) if (path / CONFIG).is_file())


def _ours(path: Path) -> bool:
    """Tell a generation, or what a killed process left of one, from a folder that has such a name."""
    there = {file.name for file in path.iterdir()} if path.is_dir() else {"a file"}
    return not there or bool(there & {WEIGHTS, STATE, HISTORY, CONFIG, IMAGES})


def _prune(folder: Path, newest: str) -> None:
    """Keep the newest generation and the one before, and nothing that a crash left behind."""
    before = [g.name for g in _generations(folder) if g.name < newest][-1:]
    others = [g for g in folder.glob("[0-9]" * 4) if _ours(g) and g.name not in (newest, *before)]
    aside = [path for path in folder.glob(".[0-9]*.*") if path.is_dir()]
    for path in (*others, *aside):
        shutil.rmtree(path, ignore_errors=True)


def _plain(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach().cpu().contiguous() for key, value in weights.items()}


def digest(said: dict[str, Any]) -> str:
    """Return the sha256 that config.json has of all else in it."""
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
