"""Cached features of a frozen backbone, computed once per image.

The last bits of a feature depend on the batch size, though not on the other images of the batch. So batches
always have the same size, with the last one padded: a feature is then a function of its image alone, and a
cached value is bit-identical to a recomputed one. Before a cache is shared, this assumption is tested on the
actual backbone, with the same image at every position of a batch.
"""

import os
from collections.abc import Iterator
from hashlib import blake2b
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cofima.core import distributed
from cofima.core.atomic import cache_folder, json_digest
from cofima.data.image_set import Images, ImageSet
from cofima.models.info import fingerprint
from cofima.models.net import Net
from cofima.training.context import Context
from cofima.training.feature_cache import KEY_BYTES, FeatureCache

BATCH_SIZE = 32
WRITE_EVERY = 2048  # images: at most this many are recomputed after a crash


class CachedFeatures:
    """Features of images, computed once and cached across tasks, methods and runs.

    A cache folder belongs to one backbone, identified by its weights, its output for a fixed image, and the
    preprocessing. Within the folder, the key of a feature is a hash of its image's pixels.
    """

    def __init__(self, net: Net, context: Context) -> None:
        self.net, self.context = net, context
        self.weights: str | None = None
        self.checked = False
        self.batch_invariant = False
        self.cache = FeatureCache()
        self.keys: WeakKeyDictionary[Images, list[bytes]] = WeakKeyDictionary()

    def invalidate(self) -> None:
        """Compare the weights again before the next feature is returned: they may have changed."""
        self.checked = False

    @torch.inference_mode()
    def __call__(self, images: Images, label: str = "features") -> Tensor:
        """Return the features of images, in order, on the CPU."""
        self.net.eval()
        if not self.checked:
            self._open_cache()
        if not self.batch_invariant:
            self.cache = FeatureCache()  # the same image in another batch would have other bits
        keys = self.keys.get(images)
        if keys is None or any(key not in self.cache for key in keys):
            keys = self.keys[images] = self._fill_cache(images, label)
        return distributed.current_shard(len(images)).gather(self.cache.take(keys))

    def batches(self, images: ImageSet, label: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield features and labels of this process's shard of images, as inputs of the head."""
        size, device = self.context.train.batch_size, self.context.device
        mine = distributed.current_shard(len(images)).rows
        features, labels = self(images, label)[mine], images.labels[mine]
        pairs = list(zip(torch.split(features, size), torch.split(labels, size), strict=True))
        for some, theirs in self.context.progress.track(pairs, len(pairs), label):
            yield some.to(device), theirs.to(device)

    def _fill_cache(self, images: Images, label: str) -> list[bytes]:
        """Compute missing features of this process's shard of images; return the keys of the shard."""
        keys: list[bytes] = []
        waiting: dict[bytes, Tensor] = {}
        fresh: dict[bytes, Tensor] = {}
        part = distributed.current_shard(len(images))
        places = torch.split(torch.arange(part.start, part.stop), BATCH_SIZE)
        for place in self.context.progress.track(places, len(places), label):
            pixels, _ = images.batch(place)
            for image in pixels:
                keys.append(_key_of(image))
                if keys[-1] not in self.cache and keys[-1] not in fresh:
                    waiting[keys[-1]] = image
            if len(waiting) >= BATCH_SIZE:
                some = list(waiting.items())
                fresh |= self._compute(dict(some[:BATCH_SIZE]))
                waiting = dict(some[BATCH_SIZE:])
            if len(fresh) >= WRITE_EVERY:
                self.cache.add(fresh)
                fresh = {}
            self.context.progress.worked(len(place))
        self.cache.add(fresh | self._compute(waiting))
        return keys

    def _compute(self, images: dict[bytes, Tensor]) -> dict[bytes, Tensor]:
        """Return the features of at most ``BATCH_SIZE`` images, padded to exactly that many."""
        if not images:
            return {}
        pixels = list(images.values())
        features = self._forward(torch.stack(pixels + pixels[-1:] * (BATCH_SIZE - len(pixels))))
        own = features[: len(pixels)].clone()  # a view would keep the backbone's whole output in memory
        return dict(zip(images, own, strict=True))

    def _forward(self, pixels: Tensor) -> Tensor:
        return self.net.features(self.context.view.test(pixels.to(self.context.device))).float().cpu()

    def _open_cache(self) -> None:
        """Open the cache of the current weights."""
        weights = fingerprint(self.net.backbone.state_dict())
        if weights != self.weights:
            view, chance = self.context.view, torch.Generator().manual_seed(0)
            picture = torch.randint(256, (3, view.stored, view.stored), dtype=torch.uint8, generator=chance)
            outputs = self._forward(picture.expand(BATCH_SIZE, -1, -1, -1))
            self.batch_invariant = torch.equal(outputs, outputs[:1].expand_as(outputs))
            on_disk = self.batch_invariant and os.environ.get("COFIMA_FEATURES") != "off"
            name = self._folder_name(weights, outputs[:1])
            self.cache = FeatureCache(cache_folder() / "features" / name if on_disk else None)
            self.weights = weights
        self.checked = True

    def _folder_name(self, weights: str, output: Tensor) -> str:
        """Return a hash of everything that a feature depends on apart from its image.

        The output for a fixed image distinguishes backbones with equal weights but different computations.
        """
        view, device = self.context.view, self.context.device
        parts = {
            "weights": weights,
            "answer": fingerprint({"answer": output}),
            "view": [view.size, view.stored, view.whole, view.mean, view.std],
            "batch": BATCH_SIZE,
            "torch": [torch.__version__, device.type, torch.get_num_threads()],
        }
        return json_digest(parts)


def _key_of(image: Tensor) -> bytes:
    """Return a hash of the shape and the raw pixels of an image."""
    digest = blake2b(str(tuple(image.shape)).encode(), digest_size=KEY_BYTES)
    digest.update(image.contiguous().numpy().data)
    return digest.digest()
