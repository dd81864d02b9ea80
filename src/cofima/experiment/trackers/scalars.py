"""The numbers of a line of metrics.jsonl, by the names that trackers show."""

from typing import Any

Line = dict[str, Any]


def scalars(line: Line) -> dict[str, float]:
    """Return every number of a line under a name with its group before a slash."""
    if line["kind"] == "epoch":
        shown = {"loss": "train/loss", "lr": "train/lr", "backbone_lr": "train/backbone_lr"}
        found = {name: line.get(key) for key, name in shown.items()} | {"seconds/epoch": line.get("seconds")}
        return _numbers(found)
    found = {"accuracy/seen": line.get("seen"), "merge/lam": line.get("lam")}
    found |= {f"accuracy/task_{place}": value for place, value in enumerate(line.get("accuracy", []), 1)}
    found |= {f"distance/{name}": value for name, value in line.get("distance", {}).items()}
    found |= {f"seconds/{name}": value for name, value in line.get("seconds", {}).items()}
    found |= {f"memory/{name}": line.get(name) for name in ("peak_memory_mb", "state_bytes")}
    return _numbers(found | {"task": line["task"]})


def _numbers(found: dict[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in found.items() if isinstance(v, int | float)}
