"""Statistics of a map that is seen tile after tile, and the norm that uses them later.

Count, mean and sum of squared deviations are found per tile, deviations from the tile's own mean,
and merged tile by tile (Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", 1979): in float64, and without E[x²] − E[x]², which has no digits left
for pixels far from zero.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tilenet.geometry.layers import Norm
from tilenet.geometry.tiles import Window
from tilenet.parallel.exchange import part_of
from tilenet.parallel.norm import EPSILON

__all__ = ["FixedNorm", "Moments", "moments_of"]

CHUNK_CELLS = 1 << 21  # of a tile that are in float64 at once


@dataclass(frozen=True)
class Moments:
    """Of each channel's cells.

    Attributes:
        count: Cells per channel.
        mean: (C,).
        squares: Sums of squared deviations from the mean, (C,).
    """

    count: float
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]

    def merged(self, other: "Moments") -> "Moments":
        """Of both sets of cells."""
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        between = apart**2 * (self.count * other.count / count)
        return Moments(count, mean, self.squares + other.squares + between)

    def grouped(self, groups: int) -> "Moments":
        """Of neighbouring channels together, `groups` equally large groups of them."""
        means, squares = self.mean.reshape(groups, -1), self.squares.reshape(groups, -1)
        mean = means.mean(1)
        between = self.count * ((means - mean[:, None]) ** 2).sum(1)
        return Moments(self.count * means.shape[1], mean, squares.sum(1) + between)


def moments_of(x: Tensor, own: Window) -> Moments:
    """Of the cells of a window of a map (1, C, H, W)."""
    part = part_of(x, own, 0, 0)
    if part.shape[2:] != (own.height, own.width):
        raise AssertionError(f"own cells {own} must lie on the map {tuple(x.shape)}")
    count = own.height * own.width
    means, squares = [], []
    for channels in torch.split(part, max(CHUNK_CELLS // count, 1), dim=1):
        wide = channels.double()
        rough = wide.mean((2, 3), keepdim=True)
        wide = wide - rough
        # What the mean's rounding left, which the squares are corrected for.
        rest = wide.mean((2, 3), keepdim=True)
        means.append((rough + rest).flatten())
        squares.append((wide.square_().sum((2, 3), keepdim=True) - count * rest**2).flatten())
    mean, sums = torch.cat(means), torch.cat(squares).clamp_(min=0)
    return Moments(count, mean.cpu().numpy(), sums.cpu().numpy())


class FixedNorm(nn.Module):
    """Instance or group norm with given statistics, (1, C, H, W) in and out.

    Args:
        plain: The module that it replaces, whose parameters it keeps under their names.
        layer: Its description.
        moments: Of the image's own cells, per channel.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, plain: nn.Module, layer: Norm, moments: Moments) -> None:
        super().__init__()
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(plain, name, None))
        groups = layer.groups if layer.norm == "group" else layer.out_channels
        folded = moments.grouped(groups)
        repeats = layer.out_channels // groups
        self.mean = np.repeat(folded.mean, repeats)
        self.scale = np.repeat(1 / np.sqrt(folded.squares / folded.count + EPSILON), repeats)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        # float32 has no room for the last digits of a mean far from zero.
        near = self.mean if wide == torch.float64 else self.mean.astype(np.float32)
        shift, rest, scale = (_as(v, x, wide) for v in (near, self.mean - near, self.scale))
        if self.weight is not None:
            scale = scale * self.weight.to(scale).view_as(scale)
        offset = -rest * scale
        if self.bias is not None:
            offset = offset + self.bias.to(offset).view_as(offset)
        return x.to(wide).sub(shift).mul_(scale).add_(offset).to(x.dtype)


def _as(values: NDArray[Any], x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(values).to(x.device, dtype).view(1, -1, 1, 1)
