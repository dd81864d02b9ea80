"""The paper's published numbers, and contradictions with other public sources."""

from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict

from cofima.models.registry import ALIASES


class _Strict(BaseModel):
    """Base class of the records of published.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PublishedNumber(_Strict):
    """One number of a table of the paper, with the paper's names."""

    table: str
    method: str
    backbone: str
    dataset: str
    metric: str
    mean: float
    std: float
    init: str = ""
    lam: str = ""


class CellPattern(_Strict):
    """A cell of a table, or a row or column if names are omitted, and its value in another source."""

    method: str | None = None
    dataset: str | None = None
    metric: str | None = None
    backbone: str | None = None
    init: str | None = None
    value: float | None = None
    std: float | None = None


class Disagreement(_Strict):
    """A contradiction between the paper's tables and another source, or another page of the paper."""

    tables: list[str]
    text: str
    source: str
    cells: list[CellPattern]


class TextNumber(_Strict):
    """One number that appears only in the paper's text, with this package's names."""

    metric: Literal["Last-Acc", "distance"]
    method: str
    backbone: str
    dataset: str
    value: float
    source: str


class Published(_Strict):
    """Content of published.json."""

    paper: str
    sources: dict[str, str]
    images: dict[str, list[tuple[int, int]]]
    """Numbers of training and test images of each dataset, for all splits that the paper may use."""
    records: list[PublishedNumber]
    texts: list[TextNumber]
    disagreements: list[Disagreement]


@cache
def published() -> Published:
    """Read the packaged published.json."""
    text = files("cofima.report.paper").joinpath("published.json").read_text(encoding="utf-8")
    return Published.model_validate_json(text)


def text_number(metric: str, method: str, dataset: str, backbone: str) -> TextNumber | None:
    """Return the number in the paper's text for a method, by the names of a configuration."""
    return next(
        (
            text
            for text in published().texts
            if (text.metric, text.method, text.dataset) == (metric, method, dataset)
            and is_backbone(backbone, text.backbone)
        ),
        None,
    )


def is_backbone(name: str, alias: str) -> bool:
    """Return True if the backbone of a configuration is that of an alias, by the alias or by timm's name."""
    known = ALIASES[alias]
    return name in (alias, *([known.timm] if known.hub else []))
