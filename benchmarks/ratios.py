"""Interleaved measurements: CPU time of each way over that of a base, round by round."""

import statistics
import time
from collections.abc import Callable


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of ``work``; wall time would measure who else uses the machine."""
    start = time.process_time()
    work()
    return time.process_time() - start


def interleaved(
    base: Callable[[], object], ways: dict[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Return each way's cost in units of the base, which is measured anew just before it."""
    base()
    for work in ways.values():
        work()  # the first call of each pays for memory and kernels
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, work in ways.items():
            unit = seconds(base)
            found[way].append(seconds(work) / unit)
    return found


def cells(ratios: list[float]) -> str:
    """Return median and smallest ratio as two cells of a Markdown table."""
    return f"{statistics.median(ratios):.2f}x | {min(ratios):.2f}x"
