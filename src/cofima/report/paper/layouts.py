"""Layouts of the paper's tables: rows, columns, and the settings that a run must have."""

from dataclasses import dataclass

SUPERVISED, MOCO, RESNET, TINY = "vit_b16_in21k", "vit_b16_mocov3", "resnet18", "vit_ti16"
BACKBONES = {
    SUPERVISED: "ViT-B/16 IN-21k supervised",
    MOCO: "ViT-B/16 MoCo-v3 IN-1k",
    RESNET: "ResNet18",
    TINY: "ViT-Tiny/16",
}
DATASETS = {"cub200": "CUB-200", "cars196": "Cars-196", "cifar100": "CIFAR-100", "imagenet_r": "ImageNet-R"}
BOTH = ("Last-Acc", "Inc-Acc")


@dataclass(frozen=True)
class Line:
    """One method of a table; ``options`` and ``pretrained`` tell lines of the same method apart."""

    method: str
    name: str  # as in the paper
    memory_free: bool | None = True
    backbone: str = SUPERVISED
    init: str = ""
    lam: str = ""
    options: tuple[tuple[str, str], ...] = ()
    pretrained: bool = True
    block: int = 0  # a rule is drawn where this changes

    @property
    def bound(self) -> bool:
        """True for the upper bound, which is never marked as best."""
        return self.method == "joint"


@dataclass(frozen=True)
class Layout:
    """Layout of one of the paper's tables.

    Attributes:
        key: Its number.
        title: Its title.
        heads: Columns before the numbers.
        lines: Its rows.
        datasets: Its datasets.
        metrics: Its metrics.
        free: Prefixes of settings that may differ from the recipe; the row label shows them.
        ranked: True to mark the best number of each column.
    """

    key: str
    title: str
    heads: tuple[str, ...]
    lines: tuple[Line, ...]
    datasets: tuple[str, ...] = tuple(DATASETS)
    metrics: tuple[str, ...] = BOTH
    free: tuple[str, ...] = ("options.", "train.precision")
    ranked: bool = True


def _main(backbone: str, without: tuple[str, ...] = ()) -> tuple[Line, ...]:
    """Return the lines of Tables 1 and 2: the upper bound, methods with a memory, methods without."""
    free = {
        "prototype": "Prototype-classifier",
        "l2p": "L2P",
        "dual_prompt": "DualPrompt",
        "ewc": "EWC",
        "lwf": "LwF",
        "seq_ft": "Seq FT",
        "ranpac": "RanPAC",
        "slca": "SLCA",
        "coma": "CoMA",
        "cofima": "CoFiMA",
    }
    memory = {"gdumb": "GDumb", "der_pp": "DER++", "bic": "BiC"}
    lines = [Line("joint", "Joint-Training", None, backbone)]
    lines += [Line(method, name, False, backbone, block=1) for method, name in memory.items()]
    lines += [
        Line(method, name, True, backbone, block=2) for method, name in free.items() if method not in without
    ]
    return tuple(lines)


_AVERAGES = (
    Line("prototype", "Prototype-classifier"),
    Line("seq_ft", "Seq FT"),
    Line("slca", "SLCA"),
    Line("weight_ensemble", "Weight-Ensemble", init="θ_0", lam="1/t", options=(("init", "pretrained"),)),
    Line("weight_ensemble", "Weight-Ensemble", init="θ*_{t−1}", lam="1/t", options=(("init", "previous"),)),
    Line("ema", "EMA"),
    Line("coma", "CoMA", init="θ*_{t−1}", lam="λ"),
    Line("cofima", "CoFiMA", init="θ*_{t−1}", lam="λ F_t"),
)
_SCRATCH = tuple(
    Line(method, name, backbone=backbone, init=init, pretrained=init == "pre-trained", block=block)
    for block, backbone in enumerate((RESNET, TINY))
    for method, name in (("joint", "Joint-Training"), ("cofima", "CoFiMA"))
    for init in ("scratch", "pre-trained")
)

LAYOUTS = {
    layout.key: layout
    for layout in (
        Layout("1", "ViT-B/16 pre-trained on ImageNet-21k", ("Method", "Memory-Free"), _main(SUPERVISED)),
        Layout(
            "2",
            "ViT-B/16 pre-trained by MoCo v3 on ImageNet-1k",
            ("Method", "Memory-Free"),
            _main(MOCO, without=("l2p", "dual_prompt")),
        ),
        Layout(
            "3",
            "averages of weights, ViT-B/16 pre-trained on ImageNet-21k",
            ("Method", "Init", "λ"),
            _AVERAGES,
        ),
        Layout(
            "scratch",
            "from scratch and pre-trained",
            ("Method", "Backbone", "Init"),
            _SCRATCH,
            ("cifar100", "imagenet_r"),
            ("Last-Acc",),
            ("options.", "train.precision", "train.lr", "train.backbone_lr_scale"),
            ranked=False,
        ),
    )
}
IN_THE_PAPER = frozenset(line.method for layout in LAYOUTS.values() for line in layout.lines)
