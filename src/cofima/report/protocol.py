"""Whether a run follows the protocol of a table of the paper; what forbids it is named."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from cofima import config, methods
from cofima.config import Config
from cofima.models.aliases import ALIASES
from cofima.report.groups import PLACE, flat
from cofima.report.layouts import DATASETS, IN_THE_PAPER, Layout, Line
from cofima.report.published import published
from cofima.report.runs import Run

RECIPE = "table1.yaml"
# told by the table's place of the run, or by what the run recorded of its images
_TOLD = ("seed", "dataset", "backbone", "method", "data.preset", "data.skip_bad", "model.pretrained")


@dataclass(frozen=True)
class Placed:
    """A run that may stand in a table: on which line, and which of its settings are not the recipe's."""

    run: Run
    line: Line
    settings: tuple[str, ...]


def place(run: Run, layout: Layout) -> Placed | list[str] | None:
    """Find a run's line in a table, or say what forbids it; None where its method is of another table."""
    dataset = str(run.config.get("dataset"))
    wrong = [] if run.finished else [f"not finished: {run.state}"]
    if dataset not in layout.datasets:
        wrong.append(f"dataset {run.dataset}: the table has {_listed(DATASETS[d] for d in layout.datasets)}")
    aliases = list(dict.fromkeys(line.backbone for line in layout.lines))
    backbone = next((alias for alias in aliases if _same(run, alias)), None)
    if backbone is None:
        wrong.append(f"backbone {run.backbone}: the table has {_listed(aliases)}")
    if wrong or backbone is None:
        return wrong
    line = _line(run, backbone, layout)
    if line is None and run.method in IN_THE_PAPER:
        return None
    line = line or Line(run.method, run.label, not _remembers(run.method), backbone, block=9)
    odd = _odd(run, _recipe(dataset, backbone, run.method if run.method in methods.names() else "seq_ft"))
    settings = tuple(text for key, text in odd.items() if key.startswith(layout.free))
    settings = tuple(s for s in settings if s.partition("=")[0] not in dict(line.options))
    wrong = [text for key, text in odd.items() if not key.startswith(layout.free)] + _images(run, dataset)
    if bool(_value(run, "model", "pretrained", True)) is not line.pretrained:
        wrong.append("the backbone is not pre-trained" if line.pretrained else "the backbone is pre-trained")
    return wrong or Placed(run, line, settings)


def _line(run: Run, backbone: str, layout: Layout) -> Line | None:
    """Return the line of the run's method, options and start."""
    options, pretrained = run.config.get("options") or {}, bool(_value(run, "model", "pretrained", True))
    mine = [line for line in layout.lines if line.method == run.method and line.backbone == backbone]
    mine = [line for line in mine if all(options.get(k) == v for k, v in line.options)]
    return next((line for line in mine if line.pretrained is pretrained), mine[0] if mine else None)


def _same(run: Run, alias: str) -> bool:
    known = ALIASES[alias]
    return run.config.get("backbone") in (alias, *([known.timm] if known.hub else []))


def _remembers(method: str) -> bool:
    return method in methods.names() and methods.find(method).keeps_images


def _odd(run: Run, recipe: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that are not the recipe's, each as it is shown."""
    mine = _defaults() | flat(run.config)
    told = [*_TOLD, *PLACE]
    if str(mine.get("stream.order_seed")) == str(run.seed):  # the same order by another name
        told.append("stream.order_seed")
    own = run.method in methods.names()  # else the recipe's options are another method's
    keys = [k for k in sorted(mine.keys() | recipe.keys()) if k not in told]
    keys = [k for k in keys if own or k in mine]
    keys = [k for k in keys if not (run.joint and k.startswith("stream."))]
    return {
        key: f"{key.removeprefix('options.')}={mine[key]}"
        + ("" if key.startswith("options.") else f" (the recipe has {recipe.get(key, 'none')})")
        for key in keys
        if key in mine and mine[key] != recipe.get(key if own or not key.startswith("options.") else "")
    }


def _images(run: Run, dataset: str) -> list[str]:
    """Say where the images, or how they are prepared, are not those of the table."""
    facts, known = run.setup.data, published().images[DATASETS[dataset]]
    found, preset = (facts.get("train"), facts.get("test")), run.setup.preprocess.get("preset", "timm")
    wrong = []
    if found not in known:
        shown = " or ".join(f"{train:,} + {test:,}" for train, test in known)
        wrong.append(f"images {found[0]} + {found[1]}: the table has {shown}")
    if preset != "slca":
        wrong.append(f"preset {preset}: the table has slca")
    return wrong


@cache
def _recipe(dataset: str, backbone: str, method: str) -> dict[str, str]:
    chosen = [f"dataset={dataset}", f"backbone={backbone}", f"method={method}"]
    return flat(config.read(RECIPE, chosen).model_dump(mode="json"))


@cache
def _defaults() -> dict[str, str]:
    """Return what runs mean that are older than a setting."""
    return flat(Config().model_dump(mode="json", exclude={"options"}))


def _value(run: Run, part: str, key: str, default: Any) -> Any:
    return (run.config.get(part) or {}).get(key, default)


def _listed(names: Any) -> str:
    return ", ".join(names)
