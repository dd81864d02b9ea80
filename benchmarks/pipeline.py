"""Cost of preparing images, against torchvision's transforms of the decoded file, and what differs.

``python benchmarks/pipeline.py`` prints the section of RESULTS.md; ``--photos FOLDER`` measures the
difference of random crops on other photographs than scikit-learn's two.
"""

import sys
import tempfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms as tv

from cofima.data import Sample, transforms
from cofima.data.image_set import ImageSet
from cofima.data.loading.loader import load
from cofima.data.loading.pixel_format import PixelFormat
from cofima.data.transforms import IMAGENET, View, crop_and_resize, crop_boxes, scaled_boxes
from ratios import cells, interleaved, seconds

BICUBIC, BILINEAR = tv.InterpolationMode.BICUBIC, tv.InterpolationMode.BILINEAR
WANTS = View(224, 248, *IMAGENET, flip=True)
BATCH, ROUNDS = 32, 5


def photographs(folder: Path | None = None) -> list[Image.Image]:
    """Return photographs: scikit-learn's two of 640 x 427 pixels, or those of a folder."""
    if folder is not None:
        return [Image.open(path).convert("RGB") for path in sorted(folder.rglob("*.jpg"))[::29]]
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(image) for image in load_sample_images().images]


def jpegs() -> list[bytes]:
    """Return a batch of JPEG files of 500 x 375 pixels, cut from photographs at different places."""
    files = []
    for number in range(BATCH):
        image = photographs()[number % 2]
        left, top = 4 * number % (image.width - 500), number % (image.height - 375)
        written = BytesIO()
        image.crop((left, top, left + 500, top + 375)).save(written, "JPEG", quality=90)
        files.append(written.getvalue())
    return files


def theirs(dataset: str, train: bool) -> tv.Compose:
    """Return the published transforms."""
    normalize = tv.Normalize(*(transforms.CIFAR if dataset == "cifar100" else IMAGENET))
    if not train:
        first = [tv.Resize(256, BICUBIC), tv.CenterCrop(224)]
    elif dataset == "cub200":
        first = [tv.Resize((300, 300), BICUBIC), tv.RandomCrop(224), tv.RandomHorizontalFlip()]
    else:
        first = [tv.RandomResizedCrop(224, interpolation=BICUBIC), tv.RandomHorizontalFlip()]
        first += [tv.ColorJitter(brightness=63 / 255)] if dataset == "cifar100" else []
    return tv.Compose([*first, tv.ToTensor(), normalize])


def compare(dataset: str, train: bool, files: list[bytes], samples: list[Image.Image]) -> str:
    """Return a row: images per CPU second of both, and how much faster ours is."""
    transform, view = theirs(dataset, train), transforms.preset_view("slca", dataset, WANTS)
    if samples:
        stored = torch.stack([tv.PILToTensor()(picture) for picture in samples])
        view = replace(view, shape=(32, 32))
    else:
        form = view.pixel_format
        stored = torch.stack([form.encode(Image.open(BytesIO(file)).convert("RGB")) for file in files])
    images, chance = ImageSet(stored, torch.arange(BATCH), torch.zeros(BATCH)), torch.Generator()

    def plain() -> Tensor:
        found = samples or [Image.open(BytesIO(file)).convert("RGB") for file in files]
        return torch.stack([transform(picture) for picture in found])

    def ours() -> Tensor:
        pixels, _ = images.batch(torch.randperm(BATCH))
        return view.train(pixels, chance) if train else view.test(pixels)

    ratios = [1 / ratio for ratio in interleaved(plain, {"ours": ours}, ROUNDS)["ours"]]
    rates = [BATCH / min(seconds(work) for _ in range(ROUNDS)) for work in (plain, ours)]
    source = "CIFAR 32 px" if samples else "JPEG 500 x 375"
    what = f"{source}, {'train' if train else 'test'}, {dataset}"
    median, smallest = (cell.strip() for cell in cells(ratios).split("|"))
    return f"| {what} | {rates[0]:,.0f} | {rates[1]:,.0f} | {median} | {smallest} |"


def storing(files: list[bytes]) -> float:
    """Return what storing an image once costs, in units of one training transform of the file."""
    transform, form = theirs("imagenet_r", True), PixelFormat(256, 224, 300)
    samples = [Sample(str(n), 0, lambda file=file: file) for n, file in enumerate(files)]

    def plain() -> None:
        for file in files:
            transform(Image.open(BytesIO(file)).convert("RGB"))

    found = interleaved(plain, {"store": lambda: load(samples, form)}, ROUNDS)["store"]
    return sorted(found)[len(found) // 2]


def differences(photos: list[Image.Image]) -> dict[str, float]:
    """Return mean differences in gray levels of random crops, of the stored form and for comparison."""
    form, found = PixelFormat(256, 224, 300), {"stored": [], "moved": [], "bilinear": [], "pillow": []}
    for number, photo in enumerate(photos):
        shape = torch.tensor([[photo.height, photo.width]])
        chance = torch.Generator().manual_seed(number)
        whole, shapes = form.decode_train(form.encode(photo)[None])
        for _ in range(max(1, 100 // len(photos))):
            box = crop_boxes(shape, 0.08, chance)
            exact = resized(photo, box, BICUBIC)
            scaled = scaled_boxes(box, shapes, 300)
            ours = crop_and_resize(whole, scaled, 224, "bicubic")[0].float()
            found["stored"].append(float((ours - at_the_same_place(photo, scaled)).abs().mean()))
            found["moved"].append(float((ours - exact).abs().mean()))
            found["bilinear"].append(float((resized(photo, box, BILINEAR) - exact).abs().mean()))
            one = crop_and_resize(tv.PILToTensor()(photo)[None], box, 224, "bicubic")[0].float()
            found["pillow"].append(float((one - exact).abs().mean()))
    return {name: float(np.mean(values)) for name, values in found.items()}


def resized(photo: Image.Image, box: Tensor, interpolation: tv.InterpolationMode) -> Tensor:
    """Cut a box out of the original and resize it, as torchvision does with Pillow."""
    crop = tv.functional.resized_crop(photo, *box[0].tolist(), [224, 224], interpolation)
    return tv.PILToTensor()(crop).float()


def at_the_same_place(photo: Image.Image, scaled: Tensor) -> Tensor:
    """Resize from the original what a box in whole pixels of the stored form shows."""
    top, left, height, width = scaled[0].tolist()
    across, down = photo.width / 300, photo.height / 300
    box = (left * across, top * down, (left + width) * across, (top + height) * down)
    crop = photo.resize((224, 224), Image.Resampling.BICUBIC, box=box)
    return tv.PILToTensor()(crop).float()


def epoch(files: list[bytes]) -> str:
    """Return a row: one pass through a small network, data included, theirs over ours."""
    import timm

    net = timm.create_model("vit_tiny_patch16_224", num_classes=10).eval()
    transform, view = theirs("imagenet_r", True), transforms.preset_view("slca", "imagenet_r", WANTS)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{n}.jpg" for n in range(BATCH)]
        for path, file in zip(paths, files, strict=True):
            path.write_bytes(file)
        stored = load([Sample(path.name, 0, path.read_bytes) for path in paths], view.pixel_format)

        def step(images: Tensor) -> None:
            net(images).logsumexp(1).mean().backward()

        def plain() -> None:
            step(torch.stack([transform(Image.open(path).convert("RGB")) for path in paths]))

        ways = {"ours": lambda: step(view.train(stored.pixels[torch.randperm(BATCH)], torch.Generator()))}
        ratios = [1 / ratio for ratio in interleaved(plain, ways, 12)["ours"]]
    median, smallest = (cell.strip() for cell in cells(ratios).split("|"))
    return f"| end to end: JPEG, train, ViT-Tiny/16 forward and backward | | | {median} | {smallest} |"


def main() -> str:
    """Measure; return a section of Markdown."""
    torch.set_num_threads(1)
    files = jpegs()
    small = [Image.open(BytesIO(file)).resize((32, 32)) for file in files]
    rows = [
        compare(dataset, train, files if photos else [], [] if photos else small)
        for dataset, train, photos in (
            ("imagenet_r", True, True),
            ("cub200", True, True),
            ("imagenet_r", False, True),
            ("cifar100", True, False),
            ("cifar100", False, False),
        )
    ]
    rows.append(epoch(files))
    found = differences(photographs())
    return "\n".join(
        [
            "## Preparing images",
            "",
            "`python benchmarks/pipeline.py`: images per CPU second, one thread, batches of 32, the",
            "published transforms (`slca`) at 224 px, and our speedup, pair by pair. torchvision",
            "decodes each file with Pillow and transforms it; `cofima` reads its stored pixels. Both",
            "produce a normalized float32 batch.",
            "",
            "| images | torchvision | cofima | median | smallest |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Storing an image, once, costs {storing(files):.1f} times one training transform of its file.",
            "With a network on the same core, its passes dominate (the last row, twelve rounds;",
            "rounds differ by a tenth): the faster preprocessing matters if a GPU waits for images.",
            "",
            "Random crops come from the stored 300 px form instead of the original: on two photographs of",
            f"640 x 427 px they differ on average by {found['stored']:.1f} gray levels of 255 from the same",
            f"place of the original, and by {found['moved']:.1f} if the box there is not aligned to whole",
            f"stored pixels. Bilinear instead of bicubic resizing differs by {found['bilinear']:.1f},",
            f"PyTorch's resizing instead of Pillow's by {found['pillow']:.2f}. Test images, and windows of",
            "fixed size (CUB, Cars, VTAB), do not differ at all.",
            "",
        ]
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--photos"]:
        print(differences(photographs(Path(sys.argv[2]))))
    else:
        print(main())
