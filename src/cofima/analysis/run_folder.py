"""Run folders for analyses: the weights after each task, and before the first."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cofima import methods
from cofima.core.errors import CofimaError
from cofima.methods.base import Method
from cofima.models import backbone
from cofima.models.backbone import build_like
from cofima.models.info import BackboneFacts
from cofima.store import model_folder
from cofima.store.config import Config
from cofima.store.history import HistoryRow, is_run
from cofima.weights.ops import Weights

NUMBERED = re.compile(r"(?:[A-Za-z_]\w*\.\d+\.)+")


@dataclass(frozen=True)
class RunFolder:
    """A run folder with at least two tasks."""

    folder: Path
    config: Config
    facts: BackboneFacts
    data: dict[str, Any]
    history: list[HistoryRow]

    @property
    def tasks(self) -> int:
        """Number of learned tasks."""
        return len(self.history)

    @cached_property
    def method(self) -> Method:
        """The method with the run's options, without a network."""
        return methods.build(self.config.method, self.config.options)

    @property
    def label(self) -> str:
        """Display name of the method."""
        return self.method.label

    def generation(self, task: int) -> Path:
        """Return the path of the generation after ``task`` tasks; raise if it was not kept."""
        place = model_folder.ancestor(self.folder, task)
        if place is None:
            raise CofimaError(
                f"{self.folder} does not keep its state after task {task} of {self.tasks}: only the last two "
                "are kept unless a run is made with keep_checkpoints=true; run it again so, in another folder"
            )
        return place

    def backbone(self, task: int) -> Weights:
        """Return the backbone's parameters after ``task`` tasks; 0 is before the first."""
        found = self.start if task == 0 else model_folder.read(self.folder, self.generation(task)).weights()
        return {key: found[key] for key in self.parameters if key in found}

    @cached_property
    def start(self) -> Weights:
        """Weights of the backbone before the first task, created again as in the run."""
        how = self.config.model.model_copy(update={"img_size": self.facts.size})
        module, facts = backbone.create(self.facts.source, how, self.config.seed)
        if facts.sha256 != self.facts.sha256:
            raise CofimaError(
                f"the weights of backbone {self.facts.name} are not those that {self.folder} began with: "
                f"sha256 {facts.sha256[:12]} now, {self.facts.sha256[:12]} then"
            )
        return module.state_dict()

    @cached_property
    def parameters(self) -> list[str]:
        """Names of the backbone's parameters; its other tensors are buffers."""
        empty = build_like(self.facts)
        return [name for name, _ in empty.named_parameters()]


def open_run(folder: Path) -> RunFolder:
    """Open a run folder; raise if it is not a run, or has learned a single task."""
    generation = model_folder.read(folder)
    record, history = generation.record, generation.history()
    if not is_run(history):
        raise CofimaError(
            f"{folder} is a model in use (cofima history {folder}), not a run: analyses relearn tasks from "
            "the dataset of a run"
        )
    if len(history) < 2:
        raise CofimaError(f"{folder} has learned one task only: there is no task before it to compare with")
    facts = TypeAdapter(BackboneFacts).validate_python(record.backbone)
    return RunFolder(folder, Config.model_validate(record.config), facts, record.data, history)


def choose_task(run: RunFolder, task: int | None) -> int:
    """Return the task to analyze; by default the last one learned."""
    chosen = run.tasks if task is None else task
    if not 2 <= chosen <= run.tasks:
        raise CofimaError(f"--task {chosen}: {run.folder} can show tasks 2 to {run.tasks}")
    return chosen


def layer_of(key: str) -> str:
    """Return the block that a weight belongs to: ``blocks.3``, ``layer1.0``, ``patch_embed``."""
    found = NUMBERED.match(key)
    return found[0].removesuffix(".") if found else key.partition(".")[0]


def by_layer(keys: Iterable[str]) -> dict[str, list[str]]:
    """Group the names of weights by layer, in the order of the network."""
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(layer_of(key), []).append(key)
    return found
