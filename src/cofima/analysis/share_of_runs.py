"""Figures of lambda from existing runs, such as those of ``cofima grid lambda.yaml``.

There is one figure per dataset, backbone and set of test images; nothing is trained or chosen.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from cofima.analysis.cells import incremental, last
from cofima.analysis.output import Result
from cofima.core.errors import CofimaError
from cofima.report.drawing import Curve, curves
from cofima.report.groups import comparable, compared
from cofima.report.metrics import summarize
from cofima.report.runs import Run, find

LAM = "options.lam"


def share_of_runs(folder: Path, by: str = "last") -> Result:
    """Plot accuracy over the share of the new weights, for all finished runs in a folder or a study."""
    runs = find([folder])
    used = [run for run in runs if run.finished and isinstance(_share(run), float)]
    sets = [some for some in comparable(used) if len({_share(run) for run in some}) > 1]
    if not sets:
        raise CofimaError(
            f"{folder}: no two finished runs that compare have different numbers as options.lam; "
            "cofima grid lambda.yaml makes some"
        )
    figures: dict[str, str] = {}
    rows: list[dict[str, object]] = []
    for some in sorted(sets, key=_place):
        name = "_".join(("lambda", *_place(some)))
        name = name if name not in figures else f"{name}_{len(figures) + 1}"
        lines = _lines(some)
        figures[name] = _draw(some[0], lines, by)
        rows += [row for label, line in lines.items() for row in _rows(name, label, line)]
    left = len(runs) - sum(map(len, sets))
    said = [f"{len(rows)} points in {len(figures)} figure{'s' if len(figures) > 1 else ''}"]
    said += [f"{left} runs are not drawn: not finished, or without another λ to compare with"] if left else []
    return Result("lambda_runs", rows, figures, said)


def _share(run: Run) -> float | None:
    lam = run.config["options"].get("lam")
    return float(lam) if isinstance(lam, int | float) else None


def _place(some: Sequence[Run]) -> tuple[str, str]:
    """Return dataset and backbone of comparable runs, as parts of a file name."""
    config = some[0].config
    parts = config["dataset"].rpartition(":")[2], some[0].record.backbone.get("alias") or some[0].backbone
    one, two = ("".join(c if c.isalnum() or c in "-." else "_" for c in Path(part).name) for part in parts)
    return one, two


def _lines(some: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each curve: one method and one set of settings, except for λ and the seed."""
    settings = [{key: value for key, value in compared(run.config).items() if key != LAM} for run in some]
    found: dict[str, list[Run]] = {}
    for run, mine in zip(some, settings, strict=True):
        twins = [other for each, other in zip(some, settings, strict=True) if each.label == run.label]
        odd = [key for key in mine if len({twin.get(key) for twin in twins}) > 1]
        more = ", ".join(f"{key.removeprefix('options.')}={mine[key]}" for key in odd)
        found.setdefault(f"{run.label} ({more})" if more else run.label, []).append(run)
    return {label: found[label] for label in sorted(found)}


def _draw(first: Run, lines: dict[str, list[Run]], by: str) -> str:
    drawn = []
    for label, some in lines.items():
        points = [(lam, summarize([_value(run, by) for run in at])) for lam, at in _by_share(some)]
        means = [over.mean for _, over in points]
        spread = [over.std or 0.0 for _, over in points]
        # mark the best share only if it was measured on held-out images: test images must not choose
        best = means.index(max(means)) if first.config["val_fraction"] else None
        drawn.append(Curve(label, [lam for lam, _ in points], means, spread, best))
    up = "Last accuracy (%)" if by == "last" else "Mean accuracy over tasks (%)"
    images = "held-out training images" if first.config["val_fraction"] else "test images"
    return curves(drawn, "λ, share of the new weights", up, f"{first.dataset}, {images}")


def _by_share(some: Iterable[Run]) -> list[tuple[float, list[Run]]]:
    found: dict[float, list[Run]] = {}
    for run in some:
        lam = _share(run)
        assert lam is not None  # others were left out
        same = found.setdefault(lam, [])
        if all(run.seed != other.seed for other in same):  # a repeated seed is not counted again
            same.append(run)
    return sorted(found.items())


def _value(run: Run, by: str) -> float:
    return last(run) if by == "last" else incremental(run)


def _rows(figure: str, label: str, some: Sequence[Run]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for lam, at in _by_share(some):
        final, mean = (summarize([value(run) for run in at]) for value in (last, incremental))
        rows.append(
            {
                "figure": figure,
                "method": at[0].method,
                "label": label,
                "dataset": at[0].dataset,
                "backbone": at[0].backbone,
                "lam": lam,
                "n": len(at),
                "seeds": " ".join(str(run.seed) for run in at),
                "last_mean": final.mean,
                "last_std": "" if final.std is None else final.std,
                "inc_mean": mean.mean,
                "inc_std": "" if mean.std is None else mean.std,
            }
        )
    return rows
