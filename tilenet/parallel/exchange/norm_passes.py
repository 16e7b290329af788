"""Statistics of a whole image that no rank holds: one pass over its tiles per norm.

A norm's input depends on the statistics of the norms before it, so pass k runs the layers before
norm k, with the earlier norms' statistics fixed, and keeps of each tile the moments of its own
cells only. Ranks take tiles in turn; all merge the moments of a round in the order of the tiles,
so that statistics are the same to the last bit on every rank and for any number of ranks.

Statistics of a map that is seen tile after tile, and the norm that uses them later.

Count, mean and sum of squared deviations are found per tile, deviations from the tile's own mean,
and merged tile by tile (Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", 1979): in float64, and without E[x²] − E[x]², which has no digits left
for pixels far from zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tilenet.geometry.layers import Layer, Norm
from tilenet.geometry.ownership import own_cells, tiling_shares, unjoined
from tilenet.geometry.tiles import Tiling
from tilenet.geometry.windows import Window
from tilenet.model.network import Network
from tilenet.model.skips import Origin
from tilenet.parallel.exchange.halo import part_of
from tilenet.parallel.health.progress import progress_bar
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.ranks.comm import agreed

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["FixedNorm", "KeptSums", "Moments", "StatisticPasses", "moments_of"]

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


class KeptSums(Protocol):
    """Where moments are kept for a run that goes on later. Collective."""

    def sums(self, norm: int) -> tuple[int, Moments | None]:
        """Tiles whose moments are known, from the first on, and the moments."""

    def sums_done(self, norm: int, tiles: int, moments: Moments, *, last: bool) -> None:
        """After a round: the moments of the tiles so far; raises what ends the run, if asked to."""


class StatisticPasses:
    """Finds the statistics of norms one after another. Collective.

    Args:
        layers: Layers of the network.
        balance: Layers per partition.
        devices: One per partition.
        precision: Precision of the arithmetic, as for `Pipe`.
        read: The network's input for a window, (1, bands, H, W).
        brief: Whether progress shows only while it takes long.
    """

    def __init__(
        self,
        layers: tuple[Layer, ...],
        balance: Sequence[int],
        devices: Sequence[torch.device],
        precision: str,
        read: Callable[[Window], Tensor],
        *,
        brief: bool = False,
    ) -> None:
        self.layers, self.balance, self.devices = layers, balance, devices
        self.precision, self.read, self.brief = precision, read, brief

    def run(
        self,
        network: Network,
        passes: Sequence[tuple[int, Tiling]],
        comm: "MPI.Intracomm",
        watchdog: Watchdog,
        kept: KeptSums | None = None,
    ) -> Network:
        """The same network with fixed statistics.

        Args:
            network: In evaluation mode.
            passes: Numbers of the norms in the order in which they run, and for each the tiles,
                with a halo that suffices for the layers before it.
            kept: Knows moments of an interrupted run and keeps new ones.

        Raises:
            AgreedError: On all ranks, for a file that one of them cannot read.
        """
        fixed = Network(list(network), network.mask_key).eval()
        num_tiles = sum(len(t.tiles) for _, t in passes)
        with progress_bar(comm, num_tiles, "tile", brief=self.brief) as progress:
            for number, (index, tiling) in enumerate(passes):
                layer = self.layers[index]
                assert isinstance(layer, Norm)
                pipe = self._prefix(fixed, index)
                windows = _own_windows(self.layers, index, tiling)
                first, moments = kept.sums(index) if kept else (0, None)
                progress.update(first)
                for start in range(first, len(tiling.tiles), comm.size):
                    doing = (
                        f"statistics of norm {number + 1} of {len(passes)}, round of tile {start}"
                    )
                    watchdog.arm(doing, 1.0 if number or start else SLOW)
                    stop = min(start + comm.size, len(tiling.tiles))
                    mine = start + comm.rank
                    x = None
                    with agreed(comm):  # a file may be broken where only one rank reads it
                        if mine < stop:
                            x = self.read(tiling.tiles[mine].read)
                    found = None if x is None else _moments(pipe, x, windows[mine])
                    for one in _everybodys(found, layer.in_channels, comm):
                        moments = one if moments is None else moments.merged(one)
                    progress.update(stop - start)
                    assert moments is not None
                    if kept:
                        kept.sums_done(index, stop, moments, last=stop == len(tiling.tiles))
                assert moments is not None
                fixed[index] = FixedNorm(network[index], layer, moments).eval()
        return fixed

    def _prefix(self, network: Network, stop: int) -> Pipe | None:
        """The first `stop` layers, on the devices that they are on in the whole network."""
        useless = unjoined(self.layers, stop)
        modules = [
            # A stash that nobody pops would keep its map until the tile is done.
            nn.Identity() if index in useless else module
            for index, module in enumerate(list(network)[:stop])
        ]
        if not modules:
            return None
        balance: list[int] = []
        for size in self.balance:
            balance.append(min(size, stop - sum(balance)))
        balance = [size for size in balance if size > 0]
        prefix = Network(modules, network.mask_key).eval()
        return Pipe(
            prefix, balance, self.devices[: len(balance)], precision=self.precision, inline=True
        )


def _moments(pipe: Pipe | None, x: Tensor, own: Window) -> Moments:
    with torch.inference_mode():
        if pipe is not None:
            (x,) = pipe([x], [Origin(())])
        return moments_of(x, own)


def _everybodys(found: Moments | None, channels: int, comm: "MPI.Intracomm") -> Sequence[Moments]:
    """What all ranks found, in their order; the last ranks of a round may have found nothing."""
    mine = np.zeros(1 + 2 * channels)
    if found is not None:
        mine[:] = (found.count, *found.mean, *found.squares)
    everything = np.empty((comm.size, mine.size))
    comm.Allgather(mine, everything)
    return [
        Moments(float(one[0]), one[1 : 1 + channels], one[1 + channels :])
        for one in everything
        if one[0] > 0
    ]


def _own_windows(layers: tuple[Layer, ...], index: int, tiling: Tiling) -> list[Window]:
    """Of each tile the cells that it owns of the layer's input, from the tile's first cell on."""
    rows, cols = (axis[index] for axis in tiling_shares(layers, tiling))
    return [own_cells(rows, cols, tiling, number) for number in range(len(tiling.tiles))]
