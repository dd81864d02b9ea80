"""The model card: classes, accuracy, history, data, backbone, intended use and limits."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import timm
import yaml
from huggingface_hub import EvalResult, ModelCardData

from cofima.store.config import Config
from cofima.store.history import HistoryRow
from cofima.store.model import Model

SHOWN = 200  # classes in the table
LIMITS = """\
Meant for images like those it learned from, to name one of the classes above. It is not meant for decisions
about people, nor where a wrong answer is dangerous and nobody looks.

- It names one of its classes for every image, also for one that shows none of them.
  `cofima predict --unknown 0.05` says so where it can.
- Its accuracy was measured on images of the same source. On images of another camera, place or time it is
  lower.
- Classes that were learned later may have cost earlier ones some accuracy; the history above says what was
  measured.
- It inherits what its pre-trained backbone learned, with the bias of the images that one was trained on."""


@dataclass(frozen=True)
class Origin:
    """Origin of a backbone's weights: its name on the hub and its license, None where unknown."""

    hub: str | None
    license: str | None


def model_card(model: Model, name: str, license: str | None = None) -> str:
    """Return a card in Markdown, with the front matter that the Hugging Face hub reads.

    Args:
        model: The model.
        name: Its name.
        license: License identifier of the hub; by default that of the backbone's weights.
    """
    origin = origin_of(model)
    front = ModelCardData(
        license=license or origin.license or "other",
        license_name=None if license or origin.license else "unknown",
        library_name="cofima",
        pipeline_tag="image-classification",
        base_model=origin.hub,
        tags=["image-classification", "continual-learning", "class-incremental-learning", "cofima"],
        model_name=name,
        eval_results=_result(model) or None,
        metrics=["accuracy"] if measured(model) else None,
    )
    return "\n".join(["---", front.to_yaml().strip(), "---", "", *_lines(model, name, origin), ""])


def _result(model: Model) -> list[EvalResult]:
    found = measured(model)
    if found is None:
        return []
    value, _, what = found
    return [
        EvalResult(
            task_type="image-classification",
            dataset_type="imagefolder",
            dataset_name=data_name(model),
            metric_type="accuracy",
            metric_value=round(value / 100, 4),
            metric_name=f"accuracy on images {what}",
        )
    ]


def _lines(model: Model, name: str, origin: Origin) -> Iterator[str]:
    method, known = model.method, model.backbone
    yield f"# {name}"
    yield ""
    yield f"An image classifier of {len(model.classes)} classes that can learn more without its old images,"
    yield f"made with [cofima](https://arxiv.org/abs/2312.08977): {method.label} ({method.paper})"
    yield f"on `{known.name}`."
    yield from ("", "## Use", "", "```python", "import cofima", "")
    yield f'classifier = cofima.load("{name}")  # the folder'
    yield 'print(classifier.predict("photo.jpg", top=5))'
    yield 'classifier.extend("more_photos")  # a folder per new class'
    yield from ("```", "", "## Accuracy", "")
    yield from _accuracy(model)
    yield from ("", "## History", "")
    yield from _history(model)
    yield from ("", "## Classes", "")
    yield from _classes(model)
    yield from ("", "## Images it learned from", "")
    yield from _data(model)
    yield from ("", "## Backbone", "")
    yield f"- `{known.name}`, {known.features} features, images of {known.size} px"
    yield f"- sha256 of the weights it started from: `{known.sha256}`"
    yield f"- license of these weights: {origin.license or 'unknown; find out before you pass it on'}"
    if origin.hub:
        yield f"- from <https://huggingface.co/{origin.hub}>"
    yield from ("", "## Intended use and limits", "", LIMITS, "", "## To repeat it", "")
    yield from _repeat(model)


def _accuracy(model: Model) -> Iterator[str]:
    found = measured(model)
    if found is None:
        yield "Not measured: no images were held out."
        return
    value, images, what = found
    yield f"{value:.1f} % of {images:,} images ({what})."
    sure = "fitted on held-out images" if "temperature" in model.serving else "not calibrated"
    yield f"Probabilities are {sure}."
    kept = model.serving.get("accuracy")
    if kept and len(kept["images"]) <= SHOWN:
        yield from ("", "| class | images | right |", "|---|---|---|")
        for each, count in kept["images"].items():
            yield f"| {_cell(each)} | {count} | {100 * kept['right'][each] / count:.1f} % |"


def _history(model: Model) -> Iterator[str]:
    yield "| | what | classes | images | accuracy % | old classes % | date |"
    yield "|---|---|---|---|---|---|---|"
    for number, row in enumerate(model.history, start=1):
        overall, old = row.overall, row.old
        lost = f"{old.before:.1f} → {old.after:.1f}" if old else ""
        cells = [
            str(number),
            row.kind,
            str(len(row.classes)),
            "" if row.train_images is None else str(row.train_images),
            "" if overall is None else f"{overall:.1f}",
            lost if not old or old.measured else f"{lost} (estimated)",
            row.date[:10],
        ]
        yield "| " + " | ".join(cells) + " |"


def _classes(model: Model) -> Iterator[str]:
    for number, task in enumerate(model.tasks, start=1):
        more = f" and {len(task) - SHOWN} more" if len(task) > SHOWN else ""
        yield f"- task {number}: {', '.join(_cell(name) for name in task[:SHOWN])}{more}"


def _data(model: Model) -> Iterator[str]:
    yield f"- name: {_cell(data_name(model))}"
    for key, value in model.data.items():
        if isinstance(value, str | int | float) and key not in ("name", "folder"):
            yield f"- {key.replace('_', ' ')}: {f'`{value}`' if key == 'fingerprint' else value}"
    held = 0 if model.images is None else len(model.images)
    yield f"- images inside the model: {held or 'none'}" + (
        f", and those that {model.method.label} keeps of old classes" if model.method.keeps_images else ""
    )
    if not held and not model.method.keeps_images:
        yield "- it may hold statistics of features (a mean and a covariance of each class)"


def _repeat(model: Model) -> Iterator[str]:
    yield "```console"
    yield from dict.fromkeys(_command(model, row) for row in model.history)  # one for all tasks of a run
    yield from ("```", "", "All settings (`config.yaml`):", "", "```yaml")
    yield yaml.safe_dump(_plain(model.config), sort_keys=False, allow_unicode=True).strip()
    yield "```"


def _command(model: Model, row: HistoryRow) -> str:
    """Return the command that wrote a row of the history."""
    config = model.config
    match row.kind:
        case "task":
            return "cofima run config.yaml --out MODEL"
        case "learn":
            photos = shlex.quote(data_name(model))
            return f"cofima learn {photos} -o MODEL --backbone {config.backbone} --method {config.method}"
        case "merge":
            return "cofima merge MODELS -o MODEL"
        case "extend" | "more images":
            return f"cofima extend MODEL PHOTOS  # {', '.join(row.classes[:8])}"
        case _:
            return f"cofima {row.kind.replace(' ', '-')} MODEL {shlex.join(row.classes)}"


def _plain(config: Config) -> dict[str, Any]:
    """Return the configuration without paths, which are private."""
    values: dict[str, Any] = config.model_dump(mode="json")
    folder = str(values["dataset"])
    if folder.startswith("folder:"):
        values["dataset"] = f"folder:{PurePath(folder.removeprefix('folder:')).name}"
    if checkpoint := values["model"].get("checkpoint"):
        values["model"]["checkpoint"] = PurePath(checkpoint).name
    return values


def _cell(text: str) -> str:
    """Make any name safe in Markdown: no markup, no new column, no HTML."""
    for mark in "\\`*_[]|":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("<", "&lt;").replace("\n", " ")


def name_of(folder: Path) -> str:
    """Return the name of a model: that of its folder."""
    return folder.resolve().name


def origin_of(model: Model) -> Origin:
    """Look the backbone up in timm; weights from a file or from scratch have no known origin."""
    options = model.config.model
    if not options.pretrained or options.checkpoint is not None:
        return Origin(None, None)
    if model.config.backbone.startswith("vit_micro"):
        return Origin(None, "apache-2.0")
    known = timm.get_pretrained_cfg(model.backbone.name, allow_unregistered=True)
    hub = getattr(known, "hf_hub_id", None)
    return Origin(hub if hub and not hub.endswith("/") else None, getattr(known, "license", None))


def measured(model: Model) -> tuple[float, int, str] | None:
    """Return the last accuracy in percent, the number of images, and their description; or None."""
    kept = model.serving.get("accuracy")
    if kept is not None and kept["images"]:
        images = sum(kept["images"].values())
        what = "held out when it last learned; they also decided when to stop"
        if len(kept["images"]) < len(model.classes):
            what += f", of {len(kept['images'])} of the {len(model.classes)} classes"
        return 100 * sum(kept["right"].values()) / images, images, what
    last = model.history[-1] if model.history else None
    if last is not None and last.kind == "task" and last.overall is not None:
        return last.overall, sum(last.sizes), "test images of all classes"
    return None


def data_name(model: Model) -> str:
    """Return the name of the images' folder, without its path, which is private."""
    said = str(model.data.get("name") or model.config.dataset)
    return PurePath(said.removeprefix("folder:")).name or said
