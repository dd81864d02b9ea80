"""Device selection."""

import torch

from cofima.core import torchrun
from cofima.core.errors import CofimaError


def choose(name: str = "auto") -> torch.device:
    """Return the device of a name; ``auto`` selects a GPU if there is one.

    Under torchrun, each process selects the GPU of its local rank.
    """
    if torchrun.world_size() > 1 and name in ("auto", "cuda"):
        return _own_gpu(name)
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # creating a tensor is not enough: "meta" tensors hold no values
    except (RuntimeError, AssertionError) as error:
        raise CofimaError(f"device = {name}: not available here ({str(error).splitlines()[0]})") from error
    return device


def _own_gpu(name: str) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto" and not count:
        return torch.device("cpu")
    local = torchrun.local_rank()
    if local >= count:
        raise CofimaError(
            f"device = {name}: process {local} of this machine has no GPU, there are {count}; "
            f"give torchrun --nproc-per-node={max(count, 1)}, or device=cpu"
        )
    return torch.device("cuda", local)
