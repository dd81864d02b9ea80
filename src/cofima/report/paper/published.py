"""The paper's published numbers, and disagreements with other public sources."""

from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict


class _Strict(BaseModel):
    """Base of the records of published.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PublishedNumber(_Strict):
    """One number of a table of the paper, under the paper's own names."""

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
    """A cell of a table, or a row or column if names are left out, and the value in another source."""

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


class Published(_Strict):
    """All of published.json."""

    paper: str
    sources: dict[str, str]
    images: dict[str, list[tuple[int, int]]]
    """Numbers of training and test images of each dataset, for every split that the paper may use."""
    records: list[PublishedNumber]
    disagreements: list[Disagreement]


@cache
def published() -> Published:
    """Read the packaged published.json."""
    text = files("cofima.report.paper").joinpath("published.json").read_text(encoding="utf-8")
    return Published.model_validate_json(text)
