"""Sets of images share pixels, and a fingerprint tells their content."""

import pytest
import torch

from cofima.data.image_set import ImageSet, join


def some_images() -> ImageSet:
    pixels = torch.randint(
        0, 256, (10, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return ImageSet(pixels, torch.arange(10), torch.arange(10) % 3)


def test_select_shares_pixels_and_composes() -> None:
    images = some_images()
    odd = images.select(images.labels == 1)
    again = odd.select(torch.tensor([2, 0]))
    assert again.pixels is images.pixels
    assert again.rows.tolist() == [7, 1]
    pixels, labels = again.batch(torch.tensor([0]))
    assert torch.equal(pixels[0], images.pixels[7])
    assert labels.tolist() == [1]
    assert images.counts() == {0: 4, 1: 3, 2: 3}
    assert len(again) == 2


def test_join_undoes_cutting() -> None:
    images = some_images()
    parts = [images.select(images.labels == label) for label in range(3)]
    joined = join(parts)
    assert sorted(joined.rows.tolist()) == list(range(10))
    assert torch.equal(joined.labels, images.labels[joined.rows])
    with pytest.raises(ValueError, match="same pixels"):
        join([images, some_images()])


def test_fingerprint_tells_content_from_storage() -> None:
    images = some_images()
    stored_apart = ImageSet(images.pixels[2:6].clone(), torch.arange(4), images.labels[2:6])
    cut = images.select(torch.arange(2, 6))
    assert stored_apart.fingerprint() == cut.fingerprint()
    assert cut.fingerprint() != images.fingerprint()
    assert cut.fingerprint() != cut.select(torch.tensor([1, 0, 2, 3])).fingerprint()
    changed = images.pixels.clone()
    changed[3, 0, 0, 0] ^= 1
    assert ImageSet(changed, cut.rows, cut.labels).fingerprint() != cut.fingerprint()
    assert ImageSet(cut.pixels, cut.rows, cut.labels.flip(0)).fingerprint() != cut.fingerprint()
    assert images.select(torch.arange(0)).fingerprint() != cut.fingerprint()
