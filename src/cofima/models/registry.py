"""Aliases of published backbones, each pinned to one set of weights; imports no torch.

Includes published facts about the pre-training data, and its overlap with datasets.
"""

from dataclasses import dataclass

# parameters without the classifier, by architecture
PARAMETERS = {
    "vit_base_patch16_224": 85_798_656,
    "vit_base_patch14_dinov2": 85_724_928,
    "vit_tiny_patch16_224": 5_524_416,
    "vit_large_patch16_224": 303_301_632,
    "resnet18": 11_176_512,
    "vit_micro": 1_619_584,
    "tf_efficientnet_lite0": 3_371_008,
    "tf_efficientnet_lite1": 4_135_680,
    "tf_efficientnet_lite2": 4_811_072,
}


@dataclass(frozen=True)
class Alias:
    """Published weights: a timm name with its tag, and the source of the weights.

    ``size``, ``mean``, ``std`` and ``crop_pct`` are given if timm's values are wrong for these weights, and
    ``trained_on`` if there is no tag to derive it from.
    """

    timm: str
    file: str = ""
    note: str = ""
    trained_on: str = ""
    size: int | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    crop_pct: float | None = None

    @property
    def hub(self) -> bool:
        """True if timm can download the weights itself."""
        return "." in self.timm

    @property
    def parameters(self) -> int:
        """Number of parameters without the classifier."""
        return PARAMETERS[self.timm.partition(".")[0]]

    @property
    def pretraining(self) -> str:
        """Description of the pre-training data."""
        return self.trained_on or pretraining(self.timm.partition(".")[2])


_AUGREG = "https://storage.googleapis.com/vit_models/augreg/"
_META = "https://dl.fbaipublicfiles.com/"

ALIASES: dict[str, Alias] = {
    "vit_b16_in21k": Alias(
        timm="vit_base_patch16_224.augreg_in21k",
        file=f"{_AUGREG}B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz",
        note="the supervised backbone of the CoFiMA paper",
    ),
    "vit_b16_in21k_orig": Alias(
        timm="vit_base_patch16_224.orig_in21k",
        file="https://storage.googleapis.com/vit_models/imagenet21k/ViT-B_16.npz",
        note="the backbone of the L2P and DualPrompt papers",
    ),
    "vit_b16_in1k_ft": Alias(
        timm="vit_base_patch16_224.augreg_in21k_ft_in1k",
        file=f"{_AUGREG}B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0"
        "--imagenet2012-steps_20k-lr_0.01-res_224.npz",
        note="what timm 0.6 called vit_base_patch16_224, and PILOT trains with",
    ),
    "vit_b16_mocov3": Alias(
        timm="vit_base_patch16_224",
        trained_on="ImageNet-1k without labels (MoCo v3)",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        crop_pct=0.875,
        file=f"{_META}moco-v3/vit-b-300ep/vit-b-300ep.pth.tar",
        note="not on the hub: give model.checkpoint=FILE; its positions are sines and cosines, trained here",
    ),
    "vit_b16_mae": Alias(
        timm="vit_base_patch16_224.mae",
        file=f"{_META}mae/pretrain/mae_pretrain_vit_base.pth",
        note="its features need more fine-tuning than those of the others",
    ),
    "vit_b14_dinov2": Alias(
        timm="vit_base_patch14_dinov2.lvd142m",
        size=224,
        file=f"{_META}dinov2/dinov2_vitb14/dinov2_vitb14_pretrain.pth",
        note="patches of 14 pixels: there is no DINOv2 with 16; its 37 x 37 positions become 16 x 16",
    ),
    "vit_b16_dino": Alias(
        timm="vit_base_patch16_224.dino",
        file=f"{_META}dino/dino_vitbase16_pretrain/dino_vitbase16_pretrain.pth",
        note="the first DINO: what the code released with the CoFiMA paper loads where the paper says DINOv2",
    ),
    "vit_ti16": Alias(
        timm="vit_tiny_patch16_224.augreg_in21k",
        file=f"{_AUGREG}Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz",
        note="the smallest of the paper's transformers",
    ),
    "vit_l16": Alias(
        timm="vit_large_patch16_224.augreg_in21k",
        file=f"{_AUGREG}L_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1.npz",
        note="pre-trained with dropout 0.1; there is none here",
    ),
    "vit_b16_sam": Alias(
        timm="vit_base_patch16_224.sam_in1k",
        file="https://storage.googleapis.com/vit_models/sam/ViT-B_16.npz",
        note="trained with sharpness-aware minimization",
    ),
    "resnet18": Alias(
        timm="resnet18.tv_in1k",
        file="https://download.pytorch.org/models/resnet18-f37072fd.pth",
        note="torchvision's weights; merging estimates its batch statistics anew",
    ),
}

# parts of timm's tags that indicate other training data as well
_OTHERS = (
    "laion",
    "openai",
    "datacomp",
    "swsl",
    "ssl",
    "ig1b",
    "yfcc",
    "webli",
    "dfn",
    "metaclip",
    "jft",
    "cc12m",
)
# pre-training data by parts of timm's tags, most specific first
_TAGS = {
    "tiny_imagenet": "Tiny-ImageNet",
    "lvd142m": "LVD-142M without labels (DINOv2)",
    "mae": "ImageNet-1k without labels (MAE)",
    "dino": "ImageNet-1k without labels (DINO)",
    "in21k_ft_in1k": "ImageNet-21k, then ImageNet-1k",
    "in22k_ft_in1k": "ImageNet-22k, then ImageNet-1k",
    "in12k_ft_in1k": "ImageNet-12k, then ImageNet-1k",
    "in21k": "ImageNet-21k",
    "in22k": "ImageNet-22k",
    "in12k": "ImageNet-12k",
    "in1k": "ImageNet-1k",
}


# published facts about images or classes that a dataset shares with ImageNet
NOT_KNOWN = "not known"

_IMAGENET = {
    "cifar100": "many of its classes are concepts of ImageNet too; its images come from another collection "
    "(80 Million Tiny Images)",
    "imagenet_r": "its 200 classes are classes of ImageNet-1k; its images are renditions, collected apart",
    "cub200": "images too: its authors warn of ImageNet, and 22 of its 5,794 test images are among the "
    "training images of ImageNet-1k (Jaderberg et al. 2015)",
    "cars196": "ImageNet has coarse classes of cars, such as convertible and sports car; shared images are "
    "not counted in any publication known here",
    "vtab": "among its classes are breeds of pets and kinds of flowers, which ImageNet has too; shared "
    "images are not counted in any publication known here",
}
_LVD = (
    "LVD-142M was gathered around ImageNet-22k, ImageNet-1k and the training images of fine-grained data, "
    "without near duplicates of its benchmarks' test images (Oquab et al. 2023, section 3 and Table 15)"
)
_GENERATED = ("digits", "blobs", "fashion_mnist")


def resolve(name: str) -> str:
    """Return the timm name of an alias; any other name is returned unchanged."""
    return ALIASES[name].timm if name in ALIASES else name


def pretraining(tag: str) -> str:
    """Return the training data of published weights, as far as it follows from their tag."""
    words = f"_{tag}_"
    other = any(f"_{word}" in words for word in _OTHERS)
    found = next((text for part, text in _TAGS.items() if f"_{part}_" in words), None)
    return found if found is not None and not other else f"not known (tag {tag})" if tag else "not known"


def known_overlap(pretraining: str, dataset: str) -> str:
    """Return the published overlap of a dataset with the pre-training data.

    To a backbone that was trained on the test images, or on labels of their classes, they are not new.
    "not known" does not mean that there is no overlap.
    """
    if pretraining.startswith("none"):
        return "none"
    if dataset in _GENERATED and ("ImageNet" in pretraining or "LVD" in pretraining):
        return "none known"
    if dataset not in _IMAGENET:
        return NOT_KNOWN
    if pretraining.startswith("LVD"):
        return _LVD
    if pretraining.startswith("Tiny-ImageNet"):
        return f"Tiny-ImageNet is a part of ImageNet-1k, of which is known: {_IMAGENET[dataset]}"
    return _IMAGENET[dataset] if pretraining.startswith("ImageNet") else NOT_KNOWN
