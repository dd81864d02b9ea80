"""The written record of a split: every image with its label, its part and the hash of its content."""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from cofima.data.source import Source
from cofima.data.verify import Contents
from cofima.errors import CofimaError
from cofima.files import cache_folder, write_text

FORMAT = 1


def write(source: Source, contents: Contents, folder: Path | None = None) -> Path:
    """Write the manifest of a source as JSON lines, its head first, and return where it is."""
    rows = "".join(f"{json.dumps(row)}\n" for row in _rows(source, contents))
    head = {
        "format": FORMAT,
        "dataset": source.name,
        "split_id": source.facts["split_id"],
        "split_hash": source.facts["split_hash"],
        "classes": source.class_names,
        "train": len(source.train),
        "test": len(source.test),
        "test_images_in_train": len(contents.shared),
        "sha256": sha256(rows.encode()).hexdigest(),
    }
    folder = cache_folder() / "splits" if folder is None else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CofimaError(f"{folder}: {(error.strerror or str(error)).lower()}") from error
    name = "".join(letter if letter.isalnum() or letter in "+.-_" else "-" for letter in head["split_id"])
    path = folder / f"{name}.jsonl"
    write_text(path, f"{json.dumps(head)}\n{rows}")
    return path


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the head and the rows of a manifest; one that was changed or cut is refused."""
    try:
        first, _, rest = path.read_text("utf-8").partition("\n")
        head = json.loads(first)
        intact = head["format"] == FORMAT and head["sha256"] == sha256(rest.encode()).hexdigest()
    except (ValueError, KeyError, TypeError) as error:
        raise CofimaError(f"{path} is not a manifest of a split ({error})") from error
    if not intact:
        raise CofimaError(f"{path} was changed or cut: its hash is not that of its lines; write it again")
    return head, [json.loads(line) for line in rest.splitlines()]


def _rows(source: Source, contents: Contents) -> Iterator[dict[str, Any]]:
    for split in ("train", "test"):
        for picture, digest in zip(getattr(source, split), getattr(contents, split), strict=True):
            yield {"split": split, "name": picture.name, "label": picture.label, "sha256": digest}
