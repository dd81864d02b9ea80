"""Process count and ranks set by torchrun, read from the environment.

Separate from :mod:`cofima.core.distributed`, since the command line needs them before importing torch.
"""

import os

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def world_size() -> int:
    """Return the number of processes started for this command."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _VARIABLES) else 1


def rank() -> int:
    """Return the rank of this process among all."""
    return int(os.environ["RANK"]) if world_size() > 1 else 0


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return int(os.environ["LOCAL_RANK"]) if world_size() > 1 else 0


def is_main_process() -> bool:
    """Return True in rank 0, the only process that prints."""
    return rank() == 0
