"""Cost of the exact diagonal Fisher information, as a ratio to one plain forward and backward pass."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import timm
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from cofima.weights.fisher.diagonal import LabeledBatches, Weights, diagonal_fisher
from ratios import cells, seconds

CLASSES = 100


@dataclass(frozen=True)
class Case:
    """One network at one size."""

    title: str
    name: str
    size: int
    batch: int
    batches: int
    rounds: int
    target: float

    def build(self) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
        """Return the network and its batches, both random."""
        torch.manual_seed(0)
        resized = {"img_size": self.size} if "vit" in self.name else {}
        net = timm.create_model(self.name, num_classes=CLASSES, **resized).eval()
        images = torch.randn(self.batches, self.batch, 3, self.size, self.size)
        targets = torch.randint(CLASSES, (self.batches, self.batch))
        as_in_runs = [batch.to(memory_format=torch.channels_last) for batch in images]
        return net, list(zip(as_in_runs, targets, strict=True))


CASES = [
    Case("ViT-Tiny/16, 64 px, batches of 32", "vit_tiny_patch16_224", 64, 32, 8, 5, 1.5),
    Case("ViT-Tiny/16, 224 px, batches of 16", "vit_tiny_patch16_224", 224, 16, 3, 3, 1.2),
    Case("EfficientNet-Lite0, 96 px, batches of 32", "tf_efficientnet_lite0", 96, 32, 4, 3, 1.5),
    Case("ResNet-18, 64 px, batches of 32", "resnet18", 64, 32, 3, 3, 1.5),
]


def plain(net: nn.Module, batches: LabeledBatches) -> None:
    for images, targets in batches:
        functional.cross_entropy(net(images), targets).backward()
        net.zero_grad()


def batch_one(net: nn.Module, batches: LabeledBatches) -> Weights:
    sums = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    images, targets = next(iter(batches))
    for x, y in zip(images, targets, strict=True):
        functional.cross_entropy(net(x[None]), y[None]).backward()
        for name, p in net.named_parameters():
            sums[name].addcmul_(p.grad, p.grad)
        net.zero_grad()
    return sums


def with_vmap(net: nn.Module, batches: LabeledBatches) -> Weights:
    params = {name: p.detach() for name, p in net.named_parameters()}
    buffers = dict(net.named_buffers())

    def loss(weights: Weights, image: Tensor, target: Tensor) -> Tensor:
        logits = functional_call(net, (weights, buffers), image[None])
        return functional.cross_entropy(logits, target[None])

    images, targets = next(iter(batches))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # attention has no batching rule on CPU
        each = vmap(grad(loss), in_dims=(None, 0, 0))(params, images, targets)
    return {name: g.square().sum(0) for name, g in each.items()}


def measure(case: Case) -> dict[str, list[float]]:
    """Return the cost of each way in units of one plain pass over the same images, round by round."""
    net, batches = case.build()
    one = batches[:1]
    eight = [(one[0][0][:8], one[0][1][:8])]
    fresh = [deepcopy(net) for _ in range(2 * (case.rounds + 1))]  # each verified anew
    ways: dict[str, tuple[LabeledBatches, Callable[[], object]]] = {
        "**exact, one pass (ours)**": (batches, lambda: diagonal_fisher(net, batches)),
        "the same, one batch": (one, lambda: diagonal_fisher(net, one)),
        "the same, one batch of a new network": (one, lambda: diagonal_fisher(fresh.pop(), one)),
        "biased batch form (ours)": (one, lambda: diagonal_fisher(net, one, estimator="batch")),
        "exact, vmap(grad)": (one, lambda: with_vmap(net, one)),
        "exact, one image at a time": (one, lambda: batch_one(net, one)),
        "8 images (ours)": (eight, lambda: diagonal_fisher(net, eight)),
        "8 images of a new network (ours)": (eight, lambda: diagonal_fisher(fresh.pop(), eight)),
        "8 images, vmap(grad)": (eight, lambda: with_vmap(net, eight)),
    }
    plain(net, one)
    for images, work in ways.values():
        if images is not batches:
            work()  # the first call of each pays for memory and kernels, and verifies the network
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(case.rounds):
        for way, (images, work) in ways.items():
            base = seconds(lambda images=images: plain(net, images))
            found[way].append(seconds(work) / base)
    return found


def main() -> str:
    """Measure every case; return a section of Markdown."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lines = [
        "## Diagonal Fisher information",
        "",
        "CPU time divided by that of plain forward and backward passes on the same images: one thread,",
        "random weights, channels-last images as in runs; each measurement is paired with a plain one",
        "just before it. A network is verified on two images, one by one, in its first call in a process:",
        '"a new network" shows the cost of this for one batch. Up to eight images are computed one by one.',
        "",
        "| network | way | median | smallest | target |",
        "|---|---|---|---|---|",
    ]
    try:
        for case in CASES:
            for way, ratios in measure(case).items():
                target = f"<= {case.target}" if "ours)**" in way else ""
                lines.append(f"| {case.title} x {case.batches} | {way} | {cells(ratios)} | {target} |")
    finally:
        torch.set_num_threads(threads)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(main())
