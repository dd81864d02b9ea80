"""Processes that torchrun started, read from the environment.

Apart from :mod:`cofima.core.distributed` because the command line asks before it imports torch.
"""

import os

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def world_size() -> int:
    """Return the number of processes that were started for this command."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _VARIABLES) else 1


def rank() -> int:
    """Return the number of this process among all."""
    return int(os.environ["RANK"]) if world_size() > 1 else 0


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ["LOCAL_RANK"]) if world_size() > 1 else 0


def is_main_process() -> bool:
    """Return True in the one process that prints."""
    return rank() == 0
