"""The two files of a generation that a report reads, and what can be wrong with them."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from cofima.config_schema import Config
from cofima.errors import CofimaError
from cofima.generations import MethodFacts
from cofima.history import HistoryRow, explain


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
        faults.extend(explain(file.name, error))
    except CofimaError as error:
        faults.append(str(error))
    return None


def read_history(file: Path, faults: list[str]) -> list[HistoryRow]:
    """Return the tasks of history.jsonl, checked; append what is wrong with them to ``faults``."""
    try:
        lines = read_text(file).splitlines()
    except CofimaError as error:
        faults.append(str(error))
        return []
    tasks: list[HistoryRow] = []
    for number, line in enumerate(lines, start=1):
        where = f"{file.name} line {number}"
        try:
            row = HistoryRow.model_validate_json(line)
        except ValidationError as error:
            faults.extend(explain(where, error))
            continue
        if row.kind == "task":
            tasks.append(row)
            faults.extend(f"{where}: {fault}" for fault in _oddities(tasks, number))
    if lines and not tasks and not faults:
        faults.append(f"{file.name}: no task of a run; cofima history shows what happened to this model")
    return tasks


def _oddities(tasks: list[HistoryRow], number: int) -> list[str]:
    """Say what in the newest task does not fit its place or the task before it."""
    row, found = tasks[-1], []
    if row.task != number:
        found.append(f"expected task {number}, got task {row.task}")
    if len(row.measured) != number:
        found.append(f"expected {number} accuracies, one for each task so far, got {len(row.measured)}")
    if len(row.sizes) != number or not all(row.sizes):
        found.append(f"expected {number} test-set sizes, one for each task so far, got {row.sizes}")
    if len(tasks) > 1 and row.sizes[: len(tasks[-2].sizes)] != tasks[-2].sizes:
        found.append(f"the test sets of earlier tasks changed size, from {tasks[-2].sizes} to {row.sizes}")
    return found
