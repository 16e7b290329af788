"""Layers with fixed statistics of a whole image, which are computed tile after tile.

Norms take count, mean and sum of squared deviations from the tile's own mean, which are computed
per tile and merged tile by tile (Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm
for computing sample variances", 1979): in float64, and without E[x²] − E[x]², which has no digits
left for pixels far from zero. Global pools take sums of each bin's cells, which are added.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tilenet.geometry.layers import GlobalPool, Layer, Norm
from tilenet.geometry.windows import Window
from tilenet.parallel.exchange.halo import part_of
from tilenet.parallel.exchange.whole_maps import AveragedOver, bin_sums

CHUNK_CELLS = 1 << 21  # cells of a tile that are held in float64 at a time

Values = NDArray[np.float64]  # the values of a statistic, in one row


class Statistic(Protocol):
    """A statistic of a whole image that a layer needs, computed tile after tile.

    Attributes:
        num_values: Length of the row.
    """

    num_values: int

    def find(self, x: Tensor, where: AveragedOver) -> Values:
        """The statistic of the own cells of a tile's map (1, C, H, W)."""

    def merged(self, first: Values, second: Values) -> Values:
        """The statistic of both sets of cells; the order decides how sums round."""

    def fixed(self, plain: nn.Module, values: Values) -> nn.Module:
        """The layer that uses these values, in the place of the plain one."""


def statistic_of(layer: Layer) -> Statistic:
    """The statistic that a norm or a global pool needs."""
    if isinstance(layer, GlobalPool):
        return OfMaximum(layer) if layer.takes == "maximum" else OfPool(layer)
    assert isinstance(layer, Norm)
    return OfNorm(layer)


class OfNorm:
    """Moments of each channel."""

    def __init__(self, layer: Norm) -> None:
        self.layer, self.num_values = layer, 1 + 2 * layer.in_channels

    def find(self, x: Tensor, where: AveragedOver) -> Values:
        """Moments of a tile's own cells."""
        return moments_of(x, where.cells.own[0]).row

    def merged(self, first: Values, second: Values) -> Values:
        """Moments of both sets of cells."""
        return Moments.of_row(first).merged(Moments.of_row(second)).row

    def fixed(self, plain: nn.Module, values: Values) -> nn.Module:
        """The norm with these moments."""
        return FixedNorm(plain, self.layer, Moments.of_row(values))


class OfPool:
    """Sums of each bin, after the number of its cells."""

    def __init__(self, layer: GlobalPool) -> None:
        self.layer, self.num_values = layer, (1 + layer.out_channels) * layer.bins**2

    def find(self, x: Tensor, where: AveragedOver) -> Values:
        """The numbers and sums of a tile's own cells."""
        rows, cols = where.in_bins(0, self.layer, torch.device("cpu"))
        counts = torch.outer(rows.sum(1), cols.sum(1))
        sums = bin_sums(x, self.layer, where)[0].cpu()
        return torch.cat([counts[None], sums]).flatten().numpy()

    def merged(self, first: Values, second: Values) -> Values:
        """The numbers and sums of both tiles."""
        return first + second

    def fixed(self, plain: nn.Module, values: Values) -> nn.Module:
        """The whole map itself."""
        maps = torch.from_numpy(values).view(-1, self.layer.bins, self.layer.bins)
        return FixedPool(maps[1:] if self.layer.takes == "sum" else maps[1:] / maps[0])


class OfMaximum:
    """The largest value of each channel, after a 1 that tells it from a tile without cells."""

    def __init__(self, layer: GlobalPool) -> None:
        self.num_values = 1 + layer.out_channels

    def find(self, x: Tensor, where: AveragedOver) -> Values:
        """A 1 and the largest values of a tile's own cells."""
        (own,) = where.cells.of(x)
        return np.array((1.0, *own[0].double().amax((1, 2)).tolist()))

    def merged(self, first: Values, second: Values) -> Values:
        """The larger of both values, channel by channel."""
        return np.maximum(first, second)

    def fixed(self, plain: nn.Module, values: Values) -> nn.Module:
        """The whole map itself."""
        return FixedPool(torch.from_numpy(values[1:]).view(-1, 1, 1))


class FixedPool(nn.Module):
    """A global pool with given averages (C, bins, bins): (B, C, H, W) to (B, C, bins, bins)."""

    def __init__(self, averages: Tensor) -> None:
        super().__init__()
        self.averages = averages

    def forward(self, x: Tensor) -> Tensor:
        return self.averages.to(x.device, x.dtype).expand(len(x), -1, -1, -1)


@dataclass(frozen=True)
class Moments:
    """Moments of each channel's cells.

    Attributes:
        count: Cells per channel.
        mean: Mean of each channel, (C,).
        squares: Sums of squared deviations from the mean, (C,).
    """

    count: float
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]

    @property
    def row(self) -> Values:
        """Count, means and squares in one row."""
        return np.array((self.count, *self.mean, *self.squares))

    @classmethod
    def of_row(cls, row: Values) -> "Moments":
        """The inverse of `row`."""
        channels = len(row) // 2
        return cls(float(row[0]), row[1 : 1 + channels], row[1 + channels :])

    def merged(self, other: "Moments") -> "Moments":
        """Moments of both sets of cells."""
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        between = apart**2 * (self.count * other.count / count)
        return Moments(count, mean, self.squares + other.squares + between)

    def grouped(self, groups: int) -> "Moments":
        """Moments of neighbouring channels together, `groups` equally large groups of them."""
        means, squares = self.mean.reshape(groups, -1), self.squares.reshape(groups, -1)
        mean = means.mean(1)
        between = self.count * ((means - mean[:, None]) ** 2).sum(1)
        return Moments(self.count * means.shape[1], mean, squares.sum(1) + between)


def moments_of(x: Tensor, own: Window) -> Moments:
    """Moments of the cells of a window of a map (1, C, H, W)."""
    part = part_of(x, own, 0, 0)
    if part.shape[2:] != (own.height, own.width):
        raise AssertionError(f"own cells {own} must lie on the map {tuple(x.shape)}")
    count = own.height * own.width
    means, squares = [], []
    for channels in torch.split(part, max(CHUNK_CELLS // count, 1), dim=1):
        wide = channels.double()
        rough = wide.mean((2, 3), keepdim=True)
        wide = wide - rough
        # The rest that the mean's rounding left; the squares are corrected for it.
        rest = wide.mean((2, 3), keepdim=True)
        means.append((rough + rest).flatten())
        squares.append((wide.square_().sum((2, 3), keepdim=True) - count * rest**2).flatten())
    mean, sums = torch.cat(means), torch.cat(squares).clamp_(min=0)
    return Moments(count, mean.cpu().numpy(), sums.cpu().numpy())


class FixedNorm(nn.Module):
    """Instance or group norm with given statistics, (1, C, H, W) in and out.

    Args:
        plain: The module that it replaces; it keeps the module's parameters and their names.
        layer: Description of that module.
        moments: Moments of the image's own cells, per channel.
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
        self.scale = np.repeat(1 / np.sqrt(folded.squares / folded.count + layer.epsilon), repeats)

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
