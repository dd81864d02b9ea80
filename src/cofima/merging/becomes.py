"""Which method a merged model folder goes on with, and what of each model's state it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cofima import methods
from cofima.merging.sources import Source

KEPT = {"raw_head", "gaussians", "fisher", "start"}
ALIGNED = {"raw_head", "gaussians"}


@dataclass(frozen=True)
class Becomes:
    """The method of the result with its options, and which parts of the state come along."""

    method: str
    options: dict[str, Any]
    parts: frozenset[str]
    note: str = ""


def becomes(sources: Sequence[Source]) -> Becomes:
    """Stay the method that all models have, if its state can be merged; else SLCA, or plain fine-tuning."""
    last = sources[-1]
    names = {source.kept["config"]["method"] for source in sources}
    parts = {frozenset(source.state_parts) for source in sources}
    shared = frozenset.intersection(*parts)
    one_start = len({source.kept["backbone"]["sha256"] for source in sources}) == 1
    if len(names) == 1 and len(parts) == 1 and shared <= KEPT and (one_start or "start" not in shared):
        return Becomes(names.pop(), last.kept["config"]["options"], shared)
    method = "slca" if shared >= ALIGNED else "seq_ft"
    kept = frozenset(ALIGNED) if method == "slca" else frozenset()
    left = sorted(frozenset.union(*parts) - kept)
    was = ", ".join(sorted({source.label for source in sources}))
    note = f"of {was}; it goes on as {methods.find(method).label}"
    note += f", and leaves behind: {', '.join(left)}" if left else ""
    return Becomes(method, methods.options_of(methods.build(method)), kept, note)


def merged_tasks(sources: Sequence[Source]) -> list[list[str]]:
    """Return the tasks of all models one after the other, each class in the first task that has it."""
    seen: set[str] = set()
    tasks = []
    for source in sources:
        for task in source.kept.get("tasks", ()):
            tasks.append([name for name in task if name not in seen])
            seen.update(task)
    return [task for task in tasks if task]
