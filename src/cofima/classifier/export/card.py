"""The model card: classes, accuracy, history, data, backbone, intended use and limits."""

import re
import shlex
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Any

import timm
import yaml
from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Template

from cofima.classifier.measure import held_out_accuracy, why_unseen
from cofima.core.wording import some
from cofima.report.history import history_table
from cofima.report.render import markdown, markdown_text
from cofima.store.history import HistoryRow
from cofima.store.hub import is_snapshot
from cofima.store.model import Model

SHOWN = 200  # classes in a table or a list
# a local path, as config.json and history.jsonl hold it
PLACE = re.compile(r"(folder:|(?:of )?(?=/))(.+)")


def model_card(model: Model, name: str, license: str | None = None, library: str = "cofima") -> str:
    """Return a Markdown model card, with the front matter that the Hugging Face hub reads.

    Args:
        model: The model.
        name: Its name.
        license: License identifier of the hub; by default that of the backbone's weights.
        library: Library that the hub names for loading it.
    """
    hub, weights_license = origin_of(model)
    found = measured(model)
    front = ModelCardData(
        license=license or weights_license or "other",
        license_name=None if license or weights_license else "unknown",
        library_name=library,
        pipeline_tag="image-classification",
        base_model=hub,
        tags=["image-classification", "continual-learning", "class-incremental-learning", "cofima"],
        model_name=name,
        eval_results=[_result(model, *found)] if found else None,
        metrics=["accuracy"] if found else None,
    )
    config = without_paths(model.config.model_dump(mode="json"))
    text = files("cofima.classifier.export").joinpath("card.jinja").read_text("utf-8")
    template = Template(text, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    card: str = template.render(
        front=front.to_yaml().strip(),
        name=name,
        model=model,
        measured=found,
        held_out=held_out_accuracy(model),
        shown=SHOWN,
        history=markdown([history_table(model.history).filled()]).rstrip("\n") + "\n",
        tasks=[some([markdown_text(each) for each in task], SHOWN) for task in model.tasks],
        data_name=data_name(model),
        facts=_facts(model),
        kept=0 if model.images is None else len(model.images),
        license=weights_license,
        hub=hub,
        commands=dict.fromkeys(_command(model, row) for row in model.history),  # one for all tasks of a run
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True).strip(),
        escape=markdown_text,
    )
    return card


def _result(model: Model, percent: float, images: int, what: str) -> EvalResult:
    return EvalResult(
        task_type="image-classification",
        dataset_type="imagefolder",
        dataset_name=data_name(model),
        metric_type="accuracy",
        metric_value=round(percent / 100, 4),
        metric_name=f"accuracy on {images:,} images {what}",
    )


def _facts(model: Model) -> dict[str, Any]:
    """Return the facts about the images, as single-line values."""
    rows = [row for row in model.history if row.kind in ("learn", "extend", "more images")]
    if rows:  # sums over all folders it learned from; the record's own facts are those of the first
        held = sum(row.held_out or 0 for row in rows)
        return {"learned": sum(row.train_images or 0 for row in rows), "held out": held}
    said = {k: v for k, v in model.data.items() if isinstance(v, str | int | float)}
    return {k: f"`{v}`" if k == "fingerprint" else v for k, v in said.items() if k not in ("name", "folder")}


def _command(model: Model, row: HistoryRow) -> str:
    """Return the command that repeats a row of the history: as recorded, or reconstructed from the row."""
    config = model.config
    if row.command:
        return row.command
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


def without_paths(value: Any) -> Any:
    """Replace paths in JSON values by the names of the folders, as paths are private."""
    if isinstance(value, dict):
        return {key: without_paths(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_paths(one) for one in value]
    place = PLACE.fullmatch(value) if isinstance(value, str) else None
    return value if place is None else place[1] + PurePath(place[2]).name


def name_of(folder: Path) -> str:
    """Return the name of a model: that of its folder or of its repository on the hub."""
    above = folder.absolute().parent
    return above.parent.name.rpartition("--")[2] if is_snapshot(folder) else folder.resolve().name


def origin_of(model: Model) -> tuple[str | None, str | None]:
    """Return the hub ID and the license of the backbone's weights; None where timm does not know them."""
    options = model.config.model
    if not options.pretrained or options.checkpoint is not None:
        return None, None
    if model.config.backbone.startswith("vit_micro"):
        return None, "apache-2.0"
    known = timm.get_pretrained_cfg(model.backbone.name, allow_unregistered=True)
    hub = getattr(known, "hf_hub_id", None)
    return hub if hub and not hub.endswith("/") else None, getattr(known, "license", None)


def measured(model: Model) -> tuple[float, int, str] | None:
    """Return the accuracy over all classes in percent, the number of images, and their description; or None.

    None unless all classes were measured: an accuracy on some classes would misrepresent the model.
    """
    held_out = held_out_accuracy(model)
    if held_out is not None and held_out.percent is not None and set(held_out.images) >= set(model.classes):
        return held_out.percent, sum(held_out.images.values()), f"of all classes, {why_unseen(model)}"
    last = model.history[-1] if model.history else None
    if last is not None and last.kind == "task" and last.overall is not None and None not in last.accuracy:
        return last.overall, sum(last.sizes), "of all classes, which it was tested on"
    return None


def data_name(model: Model) -> str:
    """Return the name of the image folder without its path, which is private."""
    said = str(model.data.get("name") or model.config.dataset)
    return PurePath(said.removeprefix("folder:")).name or said
