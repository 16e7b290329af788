"""Dropout whose masks are a function of (seed, step, image, layer, channel), never of a rank.

torch draws masks from a stream that each process walks for itself, so a channel would be kept on
one tile of an image and dropped on the next. Here all tiles of an image share their masks, however
many ranks compute them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilenet.keys import uniform
from tilenet.model.skips import origin_under_way

__all__ = ["ChannelDropout", "MaskKey"]


@dataclass
class MaskKey:
    """What the masks of the forward pass under way depend on; shared by a network's layers.

    Attributes:
        seed: Of the run.
        step: Of the run, from 0.
        images: Number of the image that each sample of the batch belongs to; a pipeline's
            micro-batches bring their own.
    """

    seed: int = 0
    step: int = 0
    images: tuple[int, ...] = ()


class ChannelDropout(nn.Module):
    """Zeroes whole channels with probability p and divides the others by 1 − p, in training.

    Channel c of image i is kept where the c-th of `keys.uniform(channels, seed, "dropout", step, i,
    layer)` is at least p. (B, C, H, W) in and out.

    Args:
        probability: That a channel is dropped.
        layer: Place of the layer in the network.
        mask_key: Shared by the network's layers; set before each forward pass.
    """

    def __init__(self, probability: float, layer: int, mask_key: MaskKey) -> None:
        super().__init__()
        self.probability = probability
        self.layer = layer
        self.mask_key = mask_key

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0:
            return x
        return x * self._masks(x.shape[0], x.shape[1]).to(x)

    def _masks(self, samples: int, channels: int) -> Tensor:
        """Masks (B, C, 1, 1), scaled by 1 / (1 − p)."""
        key = self.mask_key
        origin = origin_under_way()
        images = key.images if origin is None else origin.images
        if len(images) != samples:
            raise ValueError(
                f"each sample of the batch needs an image number (batch: {samples}, images: "
                f"{len(images)}); set mask_key.images before the forward pass"
            )
        rows = [
            uniform(channels, key.seed, "dropout", key.step, image, self.layer) >= self.probability
            for image in images
        ]
        kept = torch.tensor([row.tolist() for row in rows], dtype=torch.float64)
        return (kept / (1 - self.probability))[:, :, None, None]

    def extra_repr(self) -> str:
        return f"p={self.probability}, layer={self.layer}"
