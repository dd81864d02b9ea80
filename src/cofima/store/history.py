"""History of a model: one row per change, oldest first.

Runs, ``learn``, ``extend``, ``rename``, ``remove_class`` and ``merge`` write rows of this schema to
``history.jsonl``; reports, trackers and analyses read them. This module imports no torch.
"""

import datetime
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cofima.core.errors import problems

Kind = Literal["task", "learn", "extend", "more images", "rename", "remove class", "merge"]
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**15)]


def now() -> str:
    """Return the current date and time in UTC, in the format of a row."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Distance(BaseModel):
    """Euclidean distances that the backbone moved in one task; None if not measured."""

    model_config = ConfigDict(extra="forbid")

    trained: Amount | None = None
    merged: Amount | None = None
    from_start: Amount | None = None


class OldClasses(BaseModel):
    """Accuracy on the classes known before an extension, as the mean over classes, in percent."""

    model_config = ConfigDict(extra="forbid")

    before: Percent
    after: Percent
    drop_interval: tuple[float, float] | None = None
    """90 % interval of the drop in points, over the choice of the images."""
    measured: bool
    """True if measured on images, or on features of the current backbone; False for an estimate."""
    rests_on: str


class HistoryRow(BaseModel):
    """One change of a model: a task learned, an extension, a rename, a merge.

    Accuracies are lists with one entry per task seen, None for a task that was not measured, and empty if
    none was. A run measures on the test images of every task, ``learn`` and ``extend`` on images held out of
    training.
    """

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    task: Count
    """Number of tasks learned so far, including this one."""
    date: str = ""
    classes: list[str]
    """Classes that were learned; the old and the new name of a class that was renamed."""
    accuracy: list[Percent | None] = []
    """Accuracy per task, predicted among all classes seen."""
    sizes: list[Count] = []
    """Number of images that each accuracy was measured on."""
    top5: list[Percent] | None = None
    task_aware: list[Percent] | None = None
    """Accuracy if the task of each image is given."""
    lam: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Share of the new weights in the average."""
    distance: Distance = Distance()
    seconds: dict[str, Amount] = {}
    """Seconds per phase; ``total`` covers the whole change."""
    peak_memory_mb: Amount | None = None
    state_bytes: Count | None = None
    train_images: Count | None = None
    held_out: Count | None = None
    """Number of images held out of training for measurement, calibration and selection."""
    kept_features: Count | None = None
    """Number of held-out images, of old classes too, whose features are stored in the model folder."""
    epochs: Count | None = None
    """Number of epochs of ``learn`` and ``extend``, which may stop early."""
    notes: list[str] = []
    command: str = ""
    """Command that repeats the change, with names of folders in place of paths; empty if not recorded."""
    processes: Annotated[int, Field(ge=1)] = 1
    old: OldClasses | None = None

    @model_validator(mode="after")
    def _one_size_each(self) -> Self:
        if len(self.accuracy) != len(self.sizes):
            raise ValueError(f"{len(self.accuracy)} accuracies, and {len(self.sizes)} numbers of images")
        return self

    @property
    def measured(self) -> list[float]:
        """Accuracies of the tasks that were measured."""
        return [value for value in self.accuracy if value is not None]

    @property
    def overall(self) -> float | None:
        """Accuracy over all measured images, or None if there are none."""
        pairs = [(a, n) for a, n in zip(self.accuracy, self.sizes, strict=True) if a is not None]
        images = sum(count for _, count in pairs)
        return sum(accuracy * count for accuracy, count in pairs) / images if images else None


def is_run(rows: Iterable[HistoryRow]) -> bool:
    """Return True for the history of a run, as opposed to a model that was learned, extended or edited."""
    return all(row.kind == "task" for row in rows)


def dump_rows(rows: Sequence[HistoryRow]) -> str:
    """Return the text of history.jsonl."""
    # Escaped as ASCII: a class name may contain a Unicode line separator.
    return "".join(json.dumps(row.model_dump(mode="json")) + "\n" for row in rows)


def parse_rows(text: str, where: str) -> list[HistoryRow]:
    """Parse history.jsonl; raise one error that lists all problems."""
    rows, wrong = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            rows.append(HistoryRow.model_validate_json(line))
        except ValidationError as error:
            wrong += describe_errors(f"line {number}", error)
    if wrong:
        raise problems(where, wrong)
    return rows


def describe_errors(where: str, error: ValidationError) -> list[str]:
    """Turn a validation error into one line per problem."""
    found = []
    for fault in error.errors():
        key = ".".join(map(str, fault["loc"]))
        got = "" if fault["type"] in ("missing", "json_invalid") else f", got {str(fault['input'])[:40]!r}"
        found.append(f"{where}: {key + ': ' if key else ''}{fault['msg']}{got}")
    return found
