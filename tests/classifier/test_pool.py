"""Laws of stored statistics under more images, rare classes and removed classes."""

import pytest
import torch

from cofima.data.image_set import ImageSet
from cofima.methods.components.alignment import membership
from cofima.methods.components.gaussians import ClassGaussians
from cofima.models.head import Head
from cofima.training.loop import batches, repeats


def test_pooling_equals_having_had_all_images_at_once() -> None:
    chance = torch.Generator().manual_seed(0)
    first, second = torch.randn(40, 6, generator=chance), 2 * torch.randn(25, 6, generator=chance) + 1
    pooled, whole = ClassGaussians(), ClassGaussians()
    pooled.add(first)
    pooled.pool(0, second)
    whole.add(torch.cat([first, second]))
    assert torch.allclose(pooled.means[0], whole.means[0], atol=1e-5)
    assert torch.allclose(pooled.covariance(0), whole.covariance(0), atol=1e-4)
    assert pooled.counts == [65]


def test_one_more_image_can_be_pooled() -> None:
    chance = torch.Generator().manual_seed(0)
    first, one = torch.randn(40, 6, generator=chance), torch.ones(1, 6)
    pooled, whole = ClassGaussians(), ClassGaussians()
    pooled.add(first)
    pooled.pool(0, one)
    whole.add(torch.cat([first, one]))
    assert torch.allclose(pooled.covariance(0), whole.covariance(0), atol=1e-4)


@pytest.mark.parametrize(("balance", "share"), [(0.0, 1 / 10), (0.5, 1 / 4), (1.0, 1 / 2)])
def test_rare_classes_are_seen_more_often(balance: float, share: float) -> None:
    labels = torch.tensor([0] * 900 + [1] * 100)
    images = ImageSet(torch.empty(1000, 0), torch.arange(1000), labels)
    chance = torch.Generator().manual_seed(0)
    seen = torch.cat(batches(1000, 16, chance, repeats(images, balance, chance)))
    assert set(seen.tolist()) == set(range(1000))
    assert float((labels[seen] == 1).float().mean()) == pytest.approx(share, rel=0.02)


def test_a_block_without_rows_changes_no_norm() -> None:
    head = Head(3, [2, 0, 2])
    assert head.sizes == [2, 0, 2]
    assert head(torch.randn(5, 3)).shape == (5, 4)
    assert torch.equal(membership(head.sizes, torch.ones(())), membership([2, 2], torch.ones(())))
