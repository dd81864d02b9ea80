"""Schema of config.json: origin and files of a generation; imports no torch."""

import json
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cofima.core.atomic import json_digest

FORMAT = 4
CONFIG = "config.json"
BACKBONE = "backbone.safetensors"  # stored in the model folder, under a name with its sha256
HEAD = "head.safetensors"
STATE = "state.safetensors"
HISTORY = "history.jsonl"
IMAGES = "images.safetensors"  # only if the user asked to store images
FEATURES = "held_out.safetensors"  # features of held-out images
MOST = 10**9  # upper bound of counts: anything larger is not a count
Number = Annotated[int, Field(ge=0, le=MOST)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # strict, as it becomes part of a file name


class MethodFacts(BaseModel):
    """Facts about the method that readers need without importing it.

    Attributes:
        label: Its display name.
        all_at_once: All tasks are learned as one: there is no accuracy over time.
        keeps_images: Images of old classes are in its state.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str
    all_at_once: bool = False
    keeps_images: bool = False


class _Serving(BaseModel):
    """Validated part of the facts for prediction; a classifier may store more."""

    class Counts(BaseModel):
        """Number of held-out images per class, and of correct predictions."""

        right: dict[str, Number]
        images: dict[str, Annotated[int, Field(ge=1, le=MOST)]]

        @model_validator(mode="after")
        def _fit(self) -> Self:
            if self.right.keys() != self.images.keys():
                raise ValueError("right answers and images are of other classes")
            return self

    class FineTuning(BaseModel):
        """The second stage of a command that was interrupted: its epochs, and the identity of the command."""

        epochs: Annotated[int, Field(ge=1, le=MOST)]
        command: str

    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    offsets: list[Annotated[float, Field(allow_inf_nan=False)]] | None = None
    fine_tuning: FineTuning | None = None
    distances: list[list[Annotated[float, Field(allow_inf_nan=False)]]] = []
    accuracy: Counts | None = None
    left_out: Number = 0
    keep_images: Number = 0
    keep_features: bool = True


class Record(BaseModel):
    """Content of config.json: origin of a generation, and the sha256 of its other files.

    A model folder is untrusted: readers use only what is validated here or, where that needs torch, in
    :func:`cofima.store.model.load_model`.

    Attributes:
        format: Version of the format.
        method: Facts about the method.
        config: The resolved configuration.
        backbone: Identity of the backbone.
        preprocess: Preprocessing of images.
        data: Facts about the images.
        tasks: Class names of each task; concatenated, the order of the logits.
        planned_tasks: Number of tasks planned.
        serving: Facts for prediction, such as the calibration.
        plugins: Name, file and sha256 of each plugin that the model uses.
        parent: Name of the generation it was made from, to which ``undo`` returns; None if there is none.
        versions: Versions of packages; filled in by the writer, like ``parent``, ``files`` and ``format``.
        files: The sha256 of each other file.
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

    @model_validator(mode="after")
    def _one_offset_per_class(self) -> Self:
        offsets = self.serving.get("offsets")
        if offsets is not None and len(offsets) != len(self.classes):
            raise ValueError(f"serving has {len(offsets)} offsets for {len(self.classes)} classes")
        return self

    @property
    def classes(self) -> list[str]:
        """Names of all classes, in the order of the logits."""
        return [name for task in self.tasks for name in task]

    @property
    def weights_digest(self) -> str:
        """Digest of backbone and head, which ties a measurement (such as a Fisher file) to its model."""
        return json_digest([self.files.get(name) for name in (BACKBONE, HEAD)])

    def text(self) -> str:
        """Return the text of config.json, which ends with the sha256 of its other content."""
        content = self.model_dump()
        return json.dumps(content | {"sha256": json_digest(content)}, indent=2) + "\n"
