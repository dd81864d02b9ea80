"""Where the numbers are computed."""

import torch

from cofima.errors import CofimaError


def choose(name: str = "auto") -> torch.device:
    """Return the device by name; ``auto`` takes a GPU where there is one."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CofimaError(f"device = {name}: not available here ({str(error).splitlines()[0]})") from error
    return device
