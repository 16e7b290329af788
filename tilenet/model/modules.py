"""Modules that torch does not have: norms, pooling by 2 × 2, and dropout by key.

Pooling takes the maximum over blocks of 2 × 2 cells. Torch's own operator notes where each maximum
lies, in 8 bytes per output cell, and on a CPU it looks at one cell after another. Blocks that do
not overlap need neither: maxima of whole rows, then of columns, and in backward the same
comparisons once more. (Measured on one core, 16 channels of 512² cells, float32: forward 24 ms and
2.5 ms, both ways 36 ms and 20 ms.)

Masks of dropout are a function of (seed, step, image, layer, channel), never of a rank. torch draws
masks from a stream that each process walks for itself, so a channel would be kept on one tile of an
image and dropped on the next. Here all tiles of an image share their masks, however many ranks
compute them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilenet.model.gpipe import is_recomputing
from tilenet.model.skips import origin_under_way
from tilenet.random_keys import uniform

__all__ = ["BatchNorm", "BlockMaxPool", "ChannelDropout", "MaskKey", "block_max"]


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation that counts each tile once, (B, C, H, W) in and out.

    torch's updates its running statistics in every forward pass, and checkpointing makes two.

    Attributes:
        tiles: Tiles seen, where the running statistics are to be their plain average; None: torch's
            own blending. Counted here, since torch would ask the device for its count each time.
    """

    tiles: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training and is_recomputing():
            # Copies, not None: a checkpoint wants as many tensors saved as for the first time.
            mean, var = (
                b if b is None else b.clone() for b in (self.running_mean, self.running_var)
            )
            return F.batch_norm(x, mean, var, self.weight, self.bias, True, 0.0, self.eps)
        if self.training and self.tiles is not None:
            self.tiles += 1
            self.momentum = 1 / self.tiles
        return super().forward(x)


class BlockMaxPool(nn.MaxPool2d):
    """`MaxPool2d(2)`: the same values, and gradients to the same cells."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        return block_max(x)


def block_max(x: Tensor) -> Tensor:
    """The maximum of each block of 2 × 2 cells; (B, C, H, W) to (B, C, H // 2, W // 2).

    Of equal cells the first in the order of rows gets the gradient, as torch has it. A gradient
    that is infinite makes NaN of the cells next to it, where torch has 0; `where` would take
    longer.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _maximum(x)  # a map without backward does not keep its input
    y: Tensor = _BlockMax.apply(x)  # type: ignore[no-untyped-call]
    return y


def _maximum(x: Tensor) -> Tensor:
    rows = torch.maximum(*_halves(x, 2))  # first: these lie in memory as a whole
    return torch.maximum(*_halves(rows, 3))


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Every other row or column, and those between; an odd last one is in no block."""
    even = x.shape[dim] // 2 * 2
    if dim == 2:
        return x[:, :, 0:even:2], x[:, :, 1:even:2]
    return x[..., 0:even:2], x[..., 1:even:2]


class _BlockMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _maximum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gradient,) = grads
        (x,) = ctx.saved_tensors
        # Columns before rows, so that of equal cells the first in the order of rows wins.
        wide = torch.maximum(*_halves(x, 3))
        upper, lower = _halves(wide, 2)
        wins = upper >= lower
        to_wide = _split(gradient, wins, wide, 2)
        del wide, upper, lower
        left, right = _halves(x, 3)
        return _split(to_wide, left >= right, x, 3)


def _split(gradient: Tensor, first_wins: Tensor, like: Tensor, dim: int) -> Tensor:
    """The gradient of halves along `dim`: all of it to one of them, cell by cell."""
    whole = torch.zeros_like(like) if like.shape[dim] % 2 else torch.empty_like(like)
    first, second = _halves(whole, dim)
    torch.mul(gradient, first_wins, out=first)
    torch.sub(gradient, first, out=second)  # exact: one of them is 0
    return whole


@dataclass
class MaskKey:
    """What the masks of the forward pass under way depend on; shared by a network's layers.

    Attributes:
        seed: Seed of the run.
        step: Step of the run, from 0.
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
        probability: Probability that a channel is dropped.
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
