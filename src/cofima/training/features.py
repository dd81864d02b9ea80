"""Features of a backbone that stays as it is: an image passes through it once, whoever asks.

The last bits of a feature depend on how many images pass together, though not on which ones they are.
So here the same number passes always, the last batch filled up: a feature is then a function of its
image alone, and what is read back is what would be computed. Before a backbone is trusted with that, it
is shown one picture in every place of a batch.
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
from cofima.training.feature_cache import NAME, FeatureCache

AT_ONCE = 32
KEEP_EVERY = 2048  # images: what a crash can cost


class CachedFeatures:
    """Find the features of images, or compute them and keep them for later tasks, methods and runs.

    They are kept under a key of the backbone's weights, its answer to one picture, and the preparation
    of images, and there under a hash of each image's pixels.
    """

    def __init__(self, net: Net, context: Context) -> None:
        self.net, self.context = net, context
        self.weights: str | None = None
        self.checked = False
        self.steady = False
        self.shelf = FeatureCache()
        self.names: WeakKeyDictionary[Images, list[bytes]] = WeakKeyDictionary()

    def invalidate(self) -> None:
        """Look at the weights again before the next feature: they may have moved."""
        self.checked = False

    @torch.inference_mode()
    def __call__(self, images: Images, label: str = "features") -> Tensor:
        """Return the features of images, in order, on the CPU."""
        self.net.eval()
        if not self.checked:
            self._check()
        if not self.steady:
            self.shelf = FeatureCache()  # what is computed for one set may then not serve another
        names = self.names.get(images)
        if names is None or any(name not in self.shelf for name in names):
            names = self.names[images] = self._look(images, label)
        return distributed.current_shard(len(images)).gather(self.shelf.take(names))

    def batches(self, images: ImageSet, label: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the features of this process's part of images with their labels, for the head."""
        size, device = self.context.train.batch_size, self.context.device
        mine = distributed.current_shard(len(images)).rows
        features, labels = self(images, label)[mine], images.labels[mine]
        pairs = list(zip(torch.split(features, size), torch.split(labels, size), strict=True))
        for some, theirs in self.context.progress.track(pairs, len(pairs), label):
            yield some.to(device), theirs.to(device)

    def _look(self, images: Images, label: str) -> list[bytes]:
        """Return the names of this process's part of images, when the features of these are on the shelf."""
        names: list[bytes] = []
        waiting: dict[bytes, Tensor] = {}
        fresh: dict[bytes, Tensor] = {}
        part = distributed.current_shard(len(images))
        places = torch.split(torch.arange(part.start, part.stop), AT_ONCE)
        for place in self.context.progress.track(places, len(places), label):
            pixels, _ = images.batch(place)
            for image in pixels:
                names.append(_name(image))
                if names[-1] not in self.shelf and names[-1] not in fresh:
                    waiting[names[-1]] = image
            if len(waiting) >= AT_ONCE:
                some = list(waiting.items())
                fresh |= self._compute(dict(some[:AT_ONCE]))
                waiting = dict(some[AT_ONCE:])
            if len(fresh) >= KEEP_EVERY:
                self.shelf.add(fresh)
                fresh = {}
        self.shelf.add(fresh | self._compute(waiting))
        return names

    def _compute(self, images: dict[bytes, Tensor]) -> dict[bytes, Tensor]:
        """Return the features of at most ``AT_ONCE`` images; they pass as so many."""
        if not images:
            return {}
        pixels = list(images.values())
        features = self._pass(torch.stack(pixels + pixels[-1:] * (AT_ONCE - len(pixels))))
        own = features[: len(pixels)].clone()  # a view would keep all that the backbone returned
        return dict(zip(images, own, strict=True))

    def _pass(self, pixels: Tensor) -> Tensor:
        return self.net.features(self.context.view.test(pixels.to(self.context.device))).float().cpu()

    def _check(self) -> None:
        """Open the shelf of the weights as they are now."""
        weights = fingerprint(self.net.backbone.state_dict())
        if weights != self.weights:
            view, chance = self.context.view, torch.Generator().manual_seed(0)
            picture = torch.randint(256, (3, view.stored, view.stored), dtype=torch.uint8, generator=chance)
            answers = self._pass(picture.expand(AT_ONCE, -1, -1, -1))
            self.steady = torch.equal(answers, answers[:1].expand_as(answers))
            kept = self.steady and os.environ.get("COFIMA_FEATURES") != "off"
            key = self._key(weights, answers[:1])
            self.shelf = FeatureCache(cache_folder() / "features" / key if kept else None)
            self.weights = weights
        self.checked = True

    def _key(self, weights: str, answer: Tensor) -> str:
        """Return a hash of all that a feature depends on beside its image.

        The answer tells apart what weights do not show: how they are put together and computed with.
        """
        view, device = self.context.view, self.context.device
        how = {
            "weights": weights,
            "answer": fingerprint({"answer": answer}),
            "view": [view.size, view.stored, view.whole, view.mean, view.std],
            "batch": AT_ONCE,
            "torch": [torch.__version__, device.type, torch.get_num_threads()],
        }
        return json_digest(how)


def _name(image: Tensor) -> bytes:
    """Return a hash of an image as it is stored: of its shape and its pixels."""
    name = blake2b(str(tuple(image.shape)).encode(), digest_size=NAME)
    name.update(image.contiguous().numpy().data)
    return name.digest()
