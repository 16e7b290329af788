"""Dropout whose masks are the same on every rank.

Masks of dropout are a function of (seed, step, image, layer, channel), never of a rank. torch draws
masks from a stream that each process walks for itself, so a channel would be kept on one tile of an
image and dropped on the next. Here all tiles of an image share their masks, however many ranks
compute them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tilenet.geometry.layers import Dropout
from tilenet.model.skips import origin_under_way
from tilenet.random_keys import uniform

__all__ = ["KeyedDropout", "MaskKey"]


@dataclass
class MaskKey:
    """What the masks of the forward pass under way depend on; shared by a network's layers.

    Attributes:
        seed: Seed of the run.
        step: Step of the run, from 0.
        images: Number of the image that each sample of the batch belongs to; a pipeline's
            micro-batches bring their own.
        drops: Numbers that decide for a sample, and probability, of each layer by its place in the
            network; not of those that drop single cells.
    """

    seed: int = 0
    step: int = 0
    images: tuple[int, ...] = ()
    drops: dict[int, tuple[int, float]] = field(default_factory=dict)
    _drawn: tuple[Any, dict[Any, dict[int, Tensor]]] = (None, {})

    def masks(self, images: tuple[int, ...], like: Tensor) -> dict[int, Tensor]:
        """Masks (B, C, 1, 1) or (B, 1, 1, 1), scaled by 1 / (1 − p), of all layers in `drops`.

        Drawn for the first that asks, and sent to its device at once: a copy per layer would each
        time make the host wait for the device.
        """
        step = self.seed, self.step, len(self.drops)
        if self._drawn[0] != step:
            self._drawn = step, {}
        drawn, of = self._drawn[1], (images, like.device, like.dtype)
        if of not in drawn:  # two threads may both draw the same
            with torch.inference_mode(mode=False):  # backward may save what a map without it drew
                drawn[of] = self._draw(images, like)
        return drawn[of]

    def _draw(self, images: tuple[int, ...], like: Tensor) -> dict[int, Tensor]:
        rows = [
            np.concatenate(
                [
                    _scaled(uniform(number, self.seed, "dropout", self.step, image, layer), p)
                    for layer, (number, p) in self.drops.items()
                ]
            )
            for image in images
        ]
        host = torch.from_numpy(np.stack(rows)[:, :, None, None]).to(like.dtype)
        if like.is_cuda:
            host = host.pin_memory()
        numbers = [number for number, _ in self.drops.values()]
        masks = torch.split(host.to(like.device, non_blocking=True), numbers, dim=1)
        return dict(zip(self.drops, masks, strict=True))


class KeyedDropout(nn.Module):
    """Zeroes values with probability p and divides the others by 1 − p, in training.

    Whole channels: channel c of image i is kept where the c-th of `uniform(channels, seed,
    "dropout", step, i, layer)` is at least p. Whole samples: where the first of these is. Single
    cells: a row's cells and their channels are counted through, and the key has the row behind the
    layer. (B, C, H, W) in and out.

    Args:
        layer: Its probability, and what it drops.
        index: Place of the layer in the network.
        mask_key: Shared by the network's layers; set before each forward pass.

    Attributes:
        place: Row and column of the whole map at which a sample's map begins, by its number.
    """

    place: Callable[[int], tuple[int, int]]

    def __init__(self, layer: Dropout, index: int, mask_key: MaskKey) -> None:
        super().__init__()
        self.probability, self.drops = layer.probability, layer.drops
        self.layer = index
        self.mask_key = mask_key
        self.place = _at_the_start
        if layer.drops != "cells":
            number = layer.out_channels if layer.drops == "channels" else 1
            mask_key.drops[index] = number, layer.probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0:
            return x
        key = self.mask_key
        origin = origin_under_way()
        images = key.images if origin is None else origin.images
        if len(images) != len(x):
            raise ValueError(
                f"each sample of the batch needs an image number (batch: {len(x)}, images: "
                f"{len(images)}); set mask_key.images before the forward pass"
            )
        if self.drops != "cells":
            return x * key.masks(images, x)[self.layer]
        return x * self._cells(images, *x.shape[1:]).to(x)

    def _cells(self, images: tuple[int, ...], channels: int, rows: int, cols: int) -> Tensor:
        """Masks of single cells (B, C, H, W), scaled by 1 / (1 − p)."""
        drawn, key = [], self.mask_key
        for sample, image in enumerate(images):
            parts = key.seed, "dropout", key.step, image, self.layer
            top, left = self.place(sample)
            values = np.stack(
                [
                    uniform(cols * channels, *parts, row, first=left * channels)
                    for row in range(top, top + rows)
                ]
            )
            drawn.append(values.reshape(rows, cols, channels).transpose(2, 0, 1))
        return torch.from_numpy(_scaled(np.stack(drawn), self.probability))

    def extra_repr(self) -> str:
        return f"p={self.probability}, {self.drops}, layer={self.layer}"


def _scaled(drawn: NDArray[np.float64], p: float) -> NDArray[np.float64]:
    """What values are multiplied with: 0, or 1 / (1 − p)."""
    return (drawn >= p) / (1 - p or 1)  # of p = 1 all are 0


def _at_the_start(_: int) -> tuple[int, int]:
    return 0, 0
