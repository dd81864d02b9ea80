"""The numbers that the paper prints, and where other public sources say otherwise."""

from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """One number of a table of the paper, under the paper's own names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    table: str
    method: str
    backbone: str
    dataset: str
    metric: str
    mean: float
    std: float
    init: str = ""
    lam: str = ""


class Place(BaseModel):
    """A cell of a table, or a whole row or column where a name is left out, and what it should say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str | None = None
    dataset: str | None = None
    metric: str | None = None
    backbone: str | None = None
    init: str | None = None
    value: float | None = None
    std: float | None = None


class Disagreement(BaseModel):
    """What another source, or another page of the paper, says about numbers of its tables."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tables: list[str]
    text: str
    source: str
    cells: list[Place]


class Published(BaseModel):
    """All of published.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    paper: str
    sources: dict[str, str]
    images: dict[str, list[tuple[int, int]]]
    """Training and test images of each dataset, in every split that the paper can mean."""
    records: list[Record]
    disagreements: list[Disagreement]


@cache
def published() -> Published:
    """Read what comes with the package."""
    text = files("cofima.report.paper").joinpath("published.json").read_text(encoding="utf-8")
    return Published.model_validate_json(text)
