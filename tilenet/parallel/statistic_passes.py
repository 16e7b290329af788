"""Statistics of a whole image that no rank holds: one pass over its tiles per norm.

A norm's input depends on the statistics of the norms before it, so pass k runs the layers before
norm k, with the earlier norms' statistics fixed, and keeps of each tile the moments of its own
cells only. Ranks take tiles in turn; all merge the moments of a round in the order of the tiles,
so that statistics are the same to the last bit on every rank and for any number of ranks.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tilenet.geometry.layers import Layer, Norm
from tilenet.geometry.prefixes import unpopped
from tilenet.geometry.shares import own_cells, tiling_shares
from tilenet.geometry.tiles import Tiling, Window
from tilenet.model.network import Network
from tilenet.model.skips import Origin
from tilenet.parallel.fixed_norm import FixedNorm, Moments, moments_of
from tilenet.parallel.mesh import agreed
from tilenet.parallel.pipeline import Pipe
from tilenet.parallel.progress import progress_bar
from tilenet.parallel.watchdog import SLOW, Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["KeptSums", "StatisticPasses"]


class KeptSums(Protocol):
    """Where moments are kept for a run that goes on later. Collective."""

    def sums(self, norm: int) -> tuple[int, Moments | None]:
        """Tiles whose moments are known, from the first on, and the moments."""

    def sums_done(self, norm: int, tiles: int, moments: Moments, *, last: bool) -> None:
        """After a round: the moments of the tiles so far; raises what ends the run, if asked to."""


class StatisticPasses:
    """Finds the statistics of norms one after another. Collective.

    Args:
        layers: Of the network.
        balance: Layers per partition.
        devices: One per partition.
        precision: Of the arithmetic, as for `Pipe`.
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
        useless = unpopped(self.layers, stop)
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
