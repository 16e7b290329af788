"""Dropout whose masks are the same on every rank.

torch draws masks from a random stream of each process, so that a channel would be kept on one tile
of an image and dropped on the next. Here a mask is a function of (seed, step, image, layer,
channel), never of a rank: all tiles of an image share it, however many ranks compute them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tilenet.geometry.layers import Dropout
from tilenet.model.origin import origin_under_way
from tilenet.model.upload import upload
from tilenet.random_keys import uniform


@dataclass
class MaskKey:
    """Key of the masks of the current forward pass; a network's layers share it.

    Attributes:
        step: Step of the run, from 0.
        images: Number of the image that each sample of the batch belongs to; a pipeline's
            micro-batches bring their own.
    """

    seed: int = 0
    step: int = 0
    images: tuple[int, ...] = ()


class KeyedDropout(nn.Module):
    """Zeroes values with probability p and divides the others by 1 − p, in training.

    (B, C, H, W) in and out. `drops` says what is dropped, by numbers of `uniform(count, seed,
    "dropout", step, image, layer)`, which are kept where they are at least p:

    - `channels`: the c-th number belongs to channel c;
    - `samples`: the first number belongs to the whole sample;
    - `cells`: a row has numbers of its own, whose key has the row after the layer; they belong to
      its cells from left to right, channel by channel within a cell.

    Args:
        layer: Probability and kind of the dropout.
        index: Place of the layer in the network.
        mask_key: Shared by the network's layers; set before each forward pass.

    Attributes:
        place: Function of a sample's number: row and column of the whole map where it begins.
    """

    place: Callable[[int], tuple[int, int]]

    def __init__(self, layer: Dropout, index: int, mask_key: MaskKey) -> None:
        super().__init__()
        self.probability, self.drops = layer.probability, layer.drops
        self.layer = index
        self.mask_key = mask_key
        self.place = _at_the_start

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.probability == 0:
            return x.clone()  # an in-place ReLU may follow
        # In numpy, which takes a fraction of torch's time, and rounds alike.
        kind = np.float32 if x.dtype == torch.float32 else np.float64
        return x * upload(torch.from_numpy(self._masks(kind, *x.shape)).to(x.dtype), x.device)

    def _masks(
        self, kind: type[np.floating[Any]], samples: int, channels: int, rows: int, cols: int
    ) -> NDArray[Any]:
        """Masks (B, C, 1, 1), (B, 1, 1, 1) or (B, C, H, W), scaled by 1 / (1 − p)."""
        key = self.mask_key
        origin = origin_under_way()
        images = key.images if origin is None else origin.images
        if len(images) != samples:
            raise ValueError(
                f"each sample of the batch needs an image number (batch: {samples}, images: "
                f"{len(images)}); set mask_key.images before the forward pass"
            )
        cells, p = self.drops == "cells", self.probability
        number = 1 if self.drops == "samples" else channels
        masks = np.empty((samples, number, *((rows, cols) if cells else (1, 1))), kind)
        for sample, image in enumerate(images):
            parts = key.seed, "dropout", key.step, image, self.layer
            if cells:
                top, left = self.place(sample)
                first, count = left * channels, cols * channels
                for row in range(rows):
                    drawn = uniform(count, *parts, top + row, first=first)
                    stays = drawn >= p
                    masks[sample, :, row] = stays.reshape(cols, channels).T
            else:
                masks[sample, :, 0, 0] = uniform(number, *parts) >= p
        masks *= 1 / (1 - p or 1)  # with p = 1 all masks are 0
        return masks

    def extra_repr(self) -> str:
        return f"p={self.probability}, {self.drops}, layer={self.layer}"


def _at_the_start(_: int) -> tuple[int, int]:
    return 0, 0
