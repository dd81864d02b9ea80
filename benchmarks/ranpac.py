"""Seconds and memory of RanPAC's regression at full width: ``benchmarks/ranpac.py [images] [tasks]``."""

import resource
import sys
import time
from itertools import pairwise

import torch

from cofima.methods.components.projection import ProjectedHead, RidgeSums, best_ridge, hidden_pairs

WIDTH, FEATURES, CLASSES = 10_000, 768, 10


def main(images: int, tasks: int) -> None:
    chance = torch.Generator().manual_seed(1)
    head, sums = ProjectedHead(FEATURES, WIDTH, chance), RidgeSums.empty(WIDTH)
    for task in range(tasks):
        labels = torch.randint(CLASSES, (images,), generator=chance) + CLASSES * task
        features = torch.randn(CLASSES * tasks, FEATURES, generator=chance)[labels]
        features += torch.randn(images, FEATURES, generator=chance)
        times = [time.perf_counter()]
        sums.add(hidden_pairs(head, features, labels), CLASSES * (task + 1))
        times.append(time.perf_counter())
        ridge = best_ridge(head, features, labels, torch.Generator().manual_seed(task))
        times.append(time.perf_counter())
        sums.solve(ridge)
        times.append(time.perf_counter())
        add, choose, solve = (b - a for a, b in pairwise(times))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"task {task + 1}: add {add:.1f} s, ridge {choose:.1f} s, solve {solve:.1f} s; peak {peak:.0f} MB"
        )


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:] or ("600", "10")))
