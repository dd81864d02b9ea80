"""The schema of config.json: how a generation was made, and its other files; imports no torch."""

import json
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cofima.core.atomic import json_digest

FORMAT = 4
CONFIG = "config.json"
BACKBONE = "backbone.safetensors"  # shared by generations, under a name that tells its content
HEAD = "head.safetensors"
STATE = "state.safetensors"
HISTORY = "history.jsonl"
IMAGES = "images.safetensors"  # only where the user asked for images to be kept
FEATURES = "held_out.safetensors"  # features of held-out images
MOST = 10**9  # of anything that is counted: what is more was not counted
Number = Annotated[int, Field(ge=0, le=MOST)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # it is a part of the name of a file, too


class MethodFacts(BaseModel):
    """Facts about the method that a reader needs without importing it.

    Attributes:
        label: Its name for people.
        all_at_once: All tasks are learned as one: there is no accuracy over time.
        keeps_images: Images of old classes are in its state.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str
    all_at_once: bool = False
    keeps_images: bool = False


class _Serving(BaseModel):
    """The facts for predicting that are relied on; a classifier may have more of them."""

    class Counts(BaseModel):
        """Held-out images of each class, and how many of them were answered right."""

        right: dict[str, Number]
        images: dict[str, Annotated[int, Field(ge=1, le=MOST)]]

        @model_validator(mode="after")
        def _fit(self) -> Self:
            if self.right.keys() != self.images.keys():
                raise ValueError("right answers and images are of other classes")
            return self

    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    distances: list[list[Annotated[float, Field(allow_inf_nan=False)]]] = []
    accuracy: Counts | None = None
    keep_images: Number = 0


class Record(BaseModel):
    """Content of config.json: how a generation was made, and the sha256 of its other files.

    Its author may be anybody: whoever reads it relies on nothing that is not checked here, or, for what
    torch is needed to know, by :func:`cofima.store.model.load_model`.

    Attributes:
        config: The resolved configuration.
        backbone: Identity of the backbone.
        preprocess: Preparation of images.
        data: Facts about the images.
        tasks: Names of the classes, task by task; together the order of the logits.
        serving: Facts for predicting, for example the calibration.
        plugins: Name, file and sha256 of each plugin that the model was made with.
        parent: Name of the generation that it was made from, to which :func:`undo` returns; None without one.
        versions: Filled in by the writer, as are ``parent``, ``files`` and ``format``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    method: MethodFacts
    config: dict[str, Any]
    backbone: dict[str, Any]
    preprocess: dict[str, Any]
    data: dict[str, Any]
    tasks: list[list[str]]
    planned_tasks: int = Field(gt=0, le=MOST)
    serving: dict[str, Any] = {}
    plugins: list[dict[str, str]] = []
    parent: str | None = None
    versions: dict[str, str] = {}
    files: dict[str, Sha256] = {}

    @field_validator("tasks")
    @classmethod
    def _names_differ(cls, tasks: list[list[str]]) -> list[list[str]]:
        names = [name for task in tasks for name in task]
        if len(set(names)) < len(names) or not all(name.strip() for name in names):
            raise ValueError("names of classes are missing, or the same twice")
        return tasks

    @field_validator("serving")
    @classmethod
    def _can_serve(cls, serving: dict[str, Any]) -> dict[str, Any]:
        _Serving.model_validate(serving)
        return serving

    @property
    def classes(self) -> list[str]:
        """Names of all classes, in the order of the logits."""
        return [name for task in self.tasks for name in task]

    @property
    def weights_digest(self) -> str:
        """A digest of backbone and head, by which a measurement knows its model."""
        return json_digest([self.files.get(name) for name in (BACKBONE, HEAD)])

    def text(self) -> str:
        """Return the text of config.json, which ends with the sha256 of all else in it."""
        content = self.model_dump()
        return json.dumps(content | {"sha256": json_digest(content)}, indent=2) + "\n"
