"""Checks of where a merge goes: never over its inputs, nor over what is not a model."""

import os
from collections.abc import Iterable
from pathlib import Path

from cofima.generations import CURRENT, is_vacant


def out_problems(out: Path, inputs: Iterable[Path], folder: bool, force: bool) -> list[str]:
    """Return what forbids to write to ``out``: a file, or a model folder."""
    real = out.resolve()
    for path in inputs:
        other = path.resolve()
        if real == other or real in other.parents or (other.is_dir() and other in real.parents):
            return [f"out = {out}: would overwrite {path}, which is read; give another place"]
    there = next(parent for parent in real.parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        return [f"out = {out}: {there} is not a folder that may be written to"]
    if not folder and out.suffix != ".safetensors":
        return [f"out = {out}: files are merged into a file; its name must end in .safetensors"]
    if not out.exists() or (folder and out.is_dir() and is_vacant(out)):
        return []
    if folder != out.is_dir() or (folder and not (out / CURRENT).is_file()):
        return [
            f"out = {out}: is there, and is not a {'model folder' if folder else 'file'}; it is left alone"
        ]
    return [] if force else [f"out = {out}: exists; give another place, or --force to replace it"]
