"""How fast this machine is: seconds of a network for one image, measured once and kept."""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import timm
import torch

from cofima.core.atomic import cache_folder, write_text
from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT, Progress
from cofima.models import backbone, registry
from cofima.models.registry import ALIASES
from cofima.store.config import Config
from cofima.training import device

FILE = "speed.json"
SMALL = 20_000_000  # parameters; larger networks are measured with fewer images on a CPU


@dataclass(frozen=True)
class Speed:
    """Seconds for one image: a training step, and a forward pass."""

    step: float
    forward: float


def measure(config: Config, jobs: int = 1, progress: Progress = SILENT) -> Speed | None:
    """Return how fast a cell's backbone is when ``jobs`` run at a time; None if it cannot be built here."""
    size = _size(config)
    if size is None:
        return None
    where = device.choose(config.device)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    name = f"{registry.resolve(config.backbone).partition('.')[0]}, {size} px, {config.train.precision}"
    key = f"{name}, {_machine(where)}, torch {torch.__version__}, {threads} thread(s)"
    known = _read()
    if key not in known:
        progress.say(f"measuring {name}")
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            known = _read() | {key: asdict(_measure(config, size, where))}
        finally:
            torch.set_num_threads(before)
        write_text(_file(), json.dumps(known, indent=1) + "\n")
    return Speed(**known[key])


def _measure(config: Config, size: int, where: torch.device) -> Speed:
    """Time a few passes at random weights: what they are does not change how long they take."""
    net = backbone.build_empty(config.backbone, size).to(where)
    large = sum(weight.numel() for weight in net.parameters()) > SMALL
    count = min(config.train.batch_size, 128 if where.type == "cuda" else 2 if large else 16)
    images = torch.randn(count, 3, size, size, device=where)
    half = torch.autocast(where.type, torch.bfloat16, enabled=config.train.precision == "bf16")

    def step() -> None:
        with half:
            value = net(images).float().square().mean()
        torch.autograd.backward(value)

    def forward() -> None:
        with torch.inference_mode(), half:
            net(images)

    net.train()
    seconds = _time(step, where)
    net.eval()
    return Speed(seconds / count, _time(forward, where) / count)


def _time(work: Callable[[], None], where: torch.device, rounds: int = 3) -> float:
    """Return the shortest of some rounds, after one that is not counted."""
    taken = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        if where.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _size(config: Config) -> int | None:
    """Return the images' side, or None for a backbone that only the hub knows."""
    alias = ALIASES.get(config.backbone)
    chosen = config.model.img_size or (alias.size if alias else None)
    full = registry.resolve(config.backbone)
    if not timm.is_model(full.partition(".")[0]):
        return None
    if chosen is not None:
        return chosen
    known = timm.get_pretrained_cfg(full, allow_unregistered=True)
    return None if known is None else int(known.input_size[-1])


def _machine(where: torch.device) -> str:
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    return f"{platform.node()} {platform.machine()} {os.cpu_count()} cores"


def _file() -> Path:
    return cache_folder() / FILE


def _read() -> dict[str, dict[str, float]]:
    """Return what was measured before; a file that is not ours is as good as none."""
    try:
        known = json.loads(_file().read_text("utf-8"))
        return {key: {"step": float(v["step"]), "forward": float(v["forward"])} for key, v in known.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CofimaError):
        return {}
