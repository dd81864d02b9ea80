"""The two files of a generation that a report reads, and what can be wrong with them."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from cofima.config import Config
from cofima.errors import CofimaError
from cofima.generations import MethodFacts

Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Distance(BaseModel):
    """Euclidean distances that the backbone moved in one task; None where they were not measured."""

    trained: Amount | None = None
    merged: Amount | None = None
    from_start: Amount | None = None


class Step(BaseModel):
    """One line of history.jsonl: what was measured after one task."""

    task: int
    classes: list[str]
    accuracy: list[Percent]
    sizes: list[Annotated[int, Field(gt=0)]]
    top5: list[Percent] | None = None
    task_aware: list[Percent] | None = None
    lam: float | str | None = None
    distance: Distance = Distance()
    seconds: dict[str, Amount] = {}
    peak_memory_mb: Amount | None = None
    state_bytes: int | None = None
    notes: list[str] = []


class Setup(BaseModel):
    """The part of config.json that a report needs."""

    format: Literal[2]
    method: MethodFacts
    config: dict[str, Any]
    backbone: dict[str, Any] = {}
    data: dict[str, Any] = {}
    preprocess: dict[str, Any] = {}
    tasks: list[list[str]] = []
    planned_tasks: Annotated[int, Field(gt=0)]
    versions: dict[str, Any] = {}
    plugins: list[dict[str, str]] = []

    @field_validator("config")
    @classmethod
    def _complete(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Give settings that are younger than the run their defaults, so that it compares with later ones."""
        return Config.model_validate(values).model_dump(mode="json")


def read_text(file: Path) -> str:
    """Return the text of a file, or say why it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CofimaError(f"{file.name}: the file is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CofimaError(f"{file.name}: cannot be read ({error})") from None


def read_setup(file: Path, faults: list[str]) -> Setup | None:
    """Return the checked config.json; append what is wrong with it to ``faults``."""
    try:
        return Setup.model_validate_json(read_text(file))
    except ValidationError as error:
        faults.extend(_explain(file.name, error))
    except CofimaError as error:
        faults.append(str(error))
    return None


def read_history(file: Path, faults: list[str]) -> list[Step]:
    """Return the checked lines of history.jsonl; append what is wrong with them to ``faults``."""
    try:
        lines = read_text(file).splitlines()
    except CofimaError as error:
        faults.append(str(error))
        return []
    measured = [line for line in lines if not _in_use(line)]
    if lines and not measured:
        faults.append(f"{file.name}: no task was tested; cofima history shows what cofima learn has made")
    steps: list[Step] = []
    for number, line in enumerate(measured, start=1):
        where = f"{file.name} line {number}"
        try:
            steps.append(Step.model_validate_json(line))
        except ValidationError as error:
            faults.extend(_explain(where, error))
            continue
        faults.extend(f"{where}: {fault}" for fault in _oddities(steps, number))
    return steps


def _in_use(line: str) -> bool:
    """Tell a line of a classifier in use (learn, extend, rename, ...) from one of a run."""
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and "kind" in row


def _oddities(steps: list[Step], number: int) -> list[str]:
    """Say what in the newest line does not fit its place or the line before it."""
    step, found = steps[-1], []
    if step.task != number:
        found.append(f"expected task {number}, got task {step.task}")
    if len(step.accuracy) != number:
        found.append(f"expected {number} accuracies, one for each task so far, got {len(step.accuracy)}")
    if len(step.sizes) != number:
        found.append(f"expected {number} test-set sizes, one for each task so far, got {len(step.sizes)}")
    if len(steps) > 1 and step.sizes[: len(steps[-2].sizes)] != steps[-2].sizes:
        found.append(f"the test sets of earlier tasks changed size, from {steps[-2].sizes} to {step.sizes}")
    return found


def _explain(where: str, error: ValidationError) -> list[str]:
    """Turn a validation error into one line for each fault."""
    found = []
    for fault in error.errors():
        key = ".".join(map(str, fault["loc"]))
        got = "" if fault["type"] in ("missing", "json_invalid") else f", got {str(fault['input'])[:40]!r}"
        found.append(f"{where}: {key + ': ' if key else ''}{fault['msg']}{got}")
    return found
