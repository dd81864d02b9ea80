"""Merge plain files of tensors: same names, same shapes."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cofima.files import require_room, write_aside
from cofima.merging.fishers import Fishers
from cofima.merging.parts import Part, merge_parts
from cofima.merging.recipe import Recipe
from cofima.merging.sources import Source, kinds_that_fit, widest
from cofima.progress import Progress
from cofima.weights.mapped import create_mapped


def merge_files(
    models: Sequence[Source],
    base: Source | None,
    fishers: Fishers | None,
    recipe: Recipe,
    out: Path,
    progress: Progress,
) -> int:
    """Write the merge of files; return the size of its tensors.

    Integer tensors and metadata come from the last model that has them; types are kept, the wider
    where they differ.
    """
    kinds_that_fit([*models, *([base] if base else [])])
    kinds = {key: widest([model.weights[key] for model in models]) for key in models[0].weights}
    metadata = {key: text for model in models for key, text in model.metadata.items()}
    size = sum(kind.bytes for kind in kinds.values())
    require_room(out, size)
    progress.say(f"merging {len(models)} models of {size / 1e6:,.1f} MB: {recipe}")
    with write_aside(out) as aside, create_mapped(aside, kinds, metadata) as target:
        parts = [
            Part(
                key,
                range(len(models)),
                [model.weights[key] for model in models],
                target[key],
                base.weights[key] if base else None,
                [f[key] for f in fishers.tensors] if fishers and key in fishers.tensors[0] else None,
                put=partial(target.put, key),
            )
            for key in target
        ]
        merge_parts(parts, recipe, progress)
    return size
