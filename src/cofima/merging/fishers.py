"""Files of Fisher information, matched to the models that they were measured on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cofima.errors import CofimaError, first_problems
from cofima.generations import WEIGHTS
from cofima.merging.sources import Source
from cofima.weights.mapped import read_mapped
from cofima.weights.pieces import Weights

MODEL = "model_sha256"


@dataclass(frozen=True)
class Fishers:
    """The Fisher information of each model, still on disk, and which weights have none."""

    tensors: Sequence[Weights]
    without: Sequence[str]

    def note(self) -> list[str]:
        """Say which floating-point tensors are averaged plainly: buffers, as a rule."""
        if not self.without:
            return []
        shown = ", ".join(self.without[:3]) + (", ..." if len(self.without) > 3 else "")
        return [f"{len(self.without)} tensors have no Fisher information and are averaged plainly: {shown}"]


def open_fishers(paths: Sequence[Path], models: Sequence[Source]) -> Fishers:
    """Open one file a model; refuse what does not fit its model, or was measured on another."""
    opened = [read_mapped(path) for path in paths]
    wrong: list[str] = []
    for path, model, (fisher, said) in zip(paths, models, opened, strict=True):
        mine = weights_of(model)
        wrong += [f"{path}: {key} is not in {model.path}" for key in fisher if key not in mine]
        wrong += [
            f"{path}: {key} is {list(value.shape)}, in {model.path} {list(mine[key].shape)}"
            for key, value in fisher.items()
            if key in mine and value.shape != mine[key].shape
        ]
        measured, here = said.get(MODEL), model.kept.get("files", {}).get(WEIGHTS)
        if measured and here and measured != here:
            wrong.append(
                f"{path}: was measured on another model than {model.path} (or before it learned more)"
            )
    tensors = [fisher for fisher, _ in opened]
    for path, fisher in zip(paths, tensors, strict=True):
        lacking = [key for key in dict.fromkeys(k for f in tensors for k in f) if key not in fisher]
        wrong += [f"{path}: has nothing for {key}, another file has" for key in lacking]
    if wrong:
        raise first_problems("the Fisher information", wrong)
    if not tensors[0]:
        raise CofimaError(f"{paths[0]} has no tensors")
    last = weights_of(models[-1])
    return Fishers(
        tensors, [key for key, v in last.items() if v.is_floating_point() and key not in tensors[-1]]
    )


def weights_of(model: Source) -> Weights:
    """Return all weights of a model under the names in its file, the head's too."""
    if not model.kept:
        return model.weights
    classifier = model.kept["backbone"]["classifier"]
    return model.weights | {f"{classifier}.{key}": value for key, value in model.head.items()}
