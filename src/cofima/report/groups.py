"""Grouping of runs: comparable runs share a table, seeds of one configuration share a row."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from cofima.core.settings import flat, uncounted
from cofima.report.runs import Run
from cofima.store.config import Config

_UNCOMPARED = uncounted(Config, "compared")

Differ = Callable[[Run, Run], list[str]]


@dataclass(frozen=True)
class Group:
    """Runs of one configuration that differ only in their seed, one run per seed."""

    label: str
    runs: list[Run]
    repeats: int = 0  # additional runs of a seed in the group, which are ignored

    @property
    def all_at_once(self) -> bool:
        """True for an upper bound, which learns all classes at once."""
        return self.runs[0].all_at_once

    @property
    def finished(self) -> bool:
        """True if these runs have learned every task."""
        return self.runs[0].finished


def comparable(runs: Sequence[Run], differ: Differ | None = None) -> list[list[Run]]:
    """Split runs into comparable sets; an upper bound is added to every set whose classes it learned.

    ``differ`` returns the reasons why two runs cannot be compared; by default :func:`differences`.
    """
    differ = differ or differences
    sets: list[list[Run]] = []
    for run in sorted((r for r in runs if not r.all_at_once), key=_order):
        home = next((s for s in sets if not any(differ(run, other) for other in s)), None)
        if home is None:
            sets.append([run])
        else:
            home.append(run)
    alone: list[list[Run]] = []
    for run in sorted((r for r in runs if r.all_at_once), key=_order):
        homes = [s for s in sets if not any(differ(run, other) for other in s)]
        if not homes:  # an upper bound without other methods gets its own table
            homes = [next((s for s in alone if not differ(run, s[0])), [])]
            if not homes[0]:
                alone.extend(homes)
        for home in homes:
            home.append(run)
    return sets + alone


def differences(a: Run, b: Run, free: Sequence[str] = ()) -> list[str]:
    """Return the protocol differences that make two runs incomparable, except those in ``free``."""
    one, two = _protocol(a), _protocol(b)
    free = (*free, *(("tasks", "stream") if a.all_at_once or b.all_at_once else ()))
    keys = [key for key in one | two if not key.startswith(tuple(free))]
    if "split" not in one.keys() & two.keys():  # older runs recorded no hash of the split
        keys = [key for key in keys if key != "split"]
    found = [f"{k}: {_short(one.get(k))} / {_short(two.get(k))}" for k in keys if one.get(k) != two.get(k)]
    return found or list(_layout(a, b))


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Group runs by configuration; unfinished runs are kept apart from finished ones."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps([_settings(run), run.state, run.label], sort_keys=True), []).append(run)
    found = []
    for group in groups.values():
        by_seed = {run.seed: run for run in reversed(group)}  # the first run of a seed wins
        kept = [run for run in group if by_seed[run.seed] is run]
        found.append(Group(group[0].label, kept, len(group) - len(kept)))
    return [Group(_name(group, found), group.runs, group.repeats) for group in found]


def _order(run: Run) -> tuple[bool, str, str]:
    # finished runs first, since all their classes are known; then independent of the order of the paths
    return not run.finished, json.dumps(run.config, sort_keys=True), str(run.folder)


def compared(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings by which runs are compared, without those whose effect is recorded elsewhere."""
    return {key: value for key, value in flat(config).items() if key not in _UNCOMPARED}


def _settings(run: Run) -> dict[str, str]:
    return compared(run.config) | ({"plugin": run.code} if run.code else {})


def _protocol(run: Run) -> dict[str, str]:
    facts = {
        "dataset": run.record.data.get("fingerprint") or run.dataset,
        "backbone": run.record.backbone.get("sha256") or run.backbone,
        "final_norm": run.record.backbone.get("final_norm", "pretrained"),
        "tasks": run.planned,
    }
    parts = flat(facts) | compared({"data": run.config["data"]}) | flat({"preprocess": run.record.preprocess})
    parts |= compared({key: run.config[key] for key in ("stream", "val_fraction")})
    split = run.record.data.get("split_hash")
    return parts | ({"split": split} if split else {})


def _layout(a: Run, b: Run) -> Iterator[str]:
    """Compare tasks: by class for equal seeds, by size for different ones, as one set for an upper bound."""
    seen = range(min(len(a.tasks), len(b.tasks)))
    if a.all_at_once or b.all_at_once:
        complete = all(len(run.tasks) >= run.planned for run in (a, b))
        if complete and set(chain(*a.tasks)) != set(chain(*b.tasks)):
            yield "not the same classes"
    elif [len(a.tasks[t]) for t in seen] != [len(b.tasks[t]) for t in seen]:
        yield "tasks of other sizes"
    elif a.seed == b.seed and any(set(a.tasks[t]) != set(b.tasks[t]) for t in seen):
        yield "another order of the classes for the same seed"
    elif a.seed == b.seed and any(m != n for m, n in zip(a.sizes, b.sizes, strict=False)):
        yield "other test images"


def _name(group: Group, others: Sequence[Group]) -> str:
    """Return a unique label: add the settings that differ, and the progress of unfinished runs."""
    twins = [_settings(other.runs[0]) for other in others if other.label == group.label]
    mine = _settings(group.runs[0])
    odd = [key for key in mine if any(twin.get(key) != mine[key] for twin in twins)]
    extra = [f"{key.removeprefix('options.')}={mine[key]}" for key in odd]
    if not group.finished:
        extra.append(group.runs[0].state)
    return f"{group.label} ({', '.join(extra)})" if extra else group.label


def _short(value: str | None) -> str:
    text = "none" if value is None else value
    return text if len(text) <= 20 else f"{text[:8]}…"
