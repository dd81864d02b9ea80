"""What is known about images or classes that a pre-training set shares with a dataset.

A backbone that has seen the test images, or their classes under labels, does not learn them as new.
Only what has been published is said here; that nothing is known does not mean that nothing is shared.
"""

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


def known(pretraining: str, dataset: str) -> str:
    """Return what a dataset is known to share with the images that a backbone was pre-trained on."""
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
