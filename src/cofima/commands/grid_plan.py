"""What ``cofima grid --dry-run`` prints: every cell, whether its data is here, and how long it may take."""

import json
from collections.abc import Sequence

import yaml

from cofima import methods
from cofima.commands.console import say
from cofima.config import Config
from cofima.experiment.forecast import Forecast
from cofima.experiment.grid import minutes
from cofima.report.groups import flat


def print_plan(found: Sequence[Forecast], jobs: int, verbose: bool) -> None:
    """Print a block for each cell, what is missing once, and the sum."""
    for one in found:
        say(str(one.folder))
        if verbose:
            text = yaml.safe_dump(one.config.model_dump(mode="json"), sort_keys=False)
            say("\n".join(f"    {line}" for line in text.splitlines()))
        else:
            say(f"    {' '.join(chosen(one.config))}")
        say(f"    data: {one.data}; weights: {one.weights}; {_time(one)}")
    missing = dict.fromkeys(one.missing for one in found if one.missing)
    for text in missing:
        say(f"\n{text}")
    todo = [one for one in found if not one.done]
    seconds = [one.seconds for one in todo if one.seconds is not None]
    say(
        f"\n{len(found)} cells"
        + (f", {len(found) - len(todo)} of them done" if len(todo) < len(found) else "")
    )
    if seconds:
        unknown = (
            f", and {len(todo) - len(seconds)} whose time is not known" if len(seconds) < len(todo) else ""
        )
        say(f"about {minutes(sum(seconds) / jobs)} on this machine, {jobs} at a time{unknown}")
        say("(images times the measured time of a step, at random weights; first tasks that cells share too)")


def print_json(found: Sequence[Forecast]) -> None:
    """Print everything that is known of each cell, for programs."""
    rows = [
        {
            "folder": str(one.folder),
            "done": one.done,
            "config": one.config.model_dump(mode="json"),
            "data": {"here": not one.missing, "where": one.data, "images": one.images, "tasks": one.tasks},
            "weights": one.weights,
            "seconds": one.seconds,
        }
        for one in found
    ]
    print(json.dumps(rows, indent=2))  # as it is: a terminal's width must not break it


def chosen(config: Config) -> list[str]:
    """Return what differs from the defaults, as it would be written on a command line."""
    usual = Config(method=config.method).model_dump(mode="json")
    usual["options"] = methods.options_of(methods.build(config.method))
    plain, mine = flat(usual), flat(config.model_dump(mode="json"))
    named = {key: mine[key] for key in ("dataset", "backbone", "method", "seed")}
    return [
        f"{key}={value}" for key, value in (named | mine).items() if key in named or plain.get(key) != value
    ]


def _time(one: Forecast) -> str:
    if one.done:
        return "done"
    return "time not known" if one.seconds is None else f"about {minutes(one.seconds)}"
