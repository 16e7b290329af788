"""Statistics of a whole image that no rank holds: one pass over its tiles per layer that needs it.

The input of such a layer depends on the statistics of the ones before it, so pass k runs the layers
before number k, with the earlier statistics fixed, and keeps the contribution of each tile's own
cells. Ranks take tiles in turn; all merge the contributions of a round in the order of the tiles,
so that statistics are the same to the last bit on every rank and for any number of ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tilenet.geometry.layers import Layer
from tilenet.geometry.ownership import own_cells, tiling_shares
from tilenet.geometry.prefix import unjoined
from tilenet.geometry.tiles import Tiling
from tilenet.geometry.windows import Window
from tilenet.model.network import Network
from tilenet.model.origin import Origin
from tilenet.mpi import Intracomm
from tilenet.parallel.exchange.fixed import Statistic, statistic_of
from tilenet.parallel.exchange.network import placed_network
from tilenet.parallel.exchange.norm import Cells
from tilenet.parallel.exchange.whole_maps import AveragedOver
from tilenet.parallel.health.progress import progress_bar
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.ranks.comm import agreed

Values = NDArray[np.float64]
# The network's input for each of some windows, (1, bands, H, W), while the context lasts.
Reads = Callable[[Sequence[Window]], AbstractContextManager[Iterator[Tensor]]]


class KeptSums(Protocol):
    """Storage of sums for a run that is resumed later. Collective."""

    def sums(self, layer: int) -> tuple[int, Values | None]:
        """Return the number of leading tiles with known sums, and these sums."""

    def sums_done(self, layer: int, tiles: int, values: Values) -> None:
        """Store the sums of all tiles so far, after a round; raise `StopAgreed` on request."""

    def round_done(self) -> None:
        """End a round without storing anything; raise `StopAgreed` on request."""


class StatisticPasses:
    """Computes the statistics of norms and pools one after another. Collective.

    Args:
        balance: Layers per partition.
        devices: One device per partition.
        precision: Precision of the arithmetic, see `Pipe`.
        reads: Function that reads the network's input for windows.
        brief: Whether progress is shown only if it takes long.
    """

    def __init__(
        self,
        layers: tuple[Layer, ...],
        balance: Sequence[int],
        devices: Sequence[torch.device],
        precision: str,
        reads: Reads,
        *,
        brief: bool = False,
    ) -> None:
        self.layers, self.balance, self.devices = layers, balance, devices
        self.precision, self.reads, self.brief = precision, reads, brief

    def run(
        self,
        network: Network,
        passes: Sequence[tuple[int, Tiling]],
        comm: Intracomm,
        watchdog: Watchdog,
        kept_sums: KeptSums | None = None,
    ) -> Network:
        """Return the same network with fixed statistics.

        Args:
            network: The network, in evaluation mode.
            passes: Numbers of the layers that need the whole image in the order in which they run,
                and for each the tiles, with a halo that suffices for the layers before it.
            kept_sums: Storage of the sums of an interrupted run, and of new ones.

        Raises:
            AgreedError: On all ranks: one of them cannot read a file.
        """
        fixed = Network(list(network), network.mask_key).eval()
        num_tiles = sum(len(t.tiles) for _, t in passes)
        with progress_bar(comm, num_tiles, "tile", brief=self.brief) as progress:
            for number, (index, tiling) in enumerate(passes):
                statistic = statistic_of(self.layers[index])
                pipe = self._prefix(fixed, index)
                averaged = _own_cells(self.layers, index, tiling)
                first, values = kept_sums.sums(index) if kept_sums else (0, None)
                progress.update(first)
                own = [tile.read for tile in tiling.tiles[first + comm.rank :: comm.size]]
                with self.reads(own) as images:
                    for start in range(first, len(tiling.tiles), comm.size):
                        doing = (
                            f"statistics of layer {index}, pass {number + 1} of {len(passes)}, "
                            f"round of tile {start}"
                        )
                        watchdog.arm(doing, 1.0 if number or start else SLOW)
                        stop = min(start + comm.size, len(tiling.tiles))
                        tile = start + comm.rank
                        with agreed(comm):  # a file may be broken where only one rank reads it
                            x = next(images, None)
                        own_values = None
                        if x is not None:
                            origin = Origin((0,), tiling, (tile,))
                            own_values = _tile_values(statistic, pipe, x, origin, averaged[tile])
                        for more in _gathered(own_values, statistic, comm)[: stop - start]:
                            values = more if values is None else statistic.merged(values, more)
                        progress.update(stop - start)
                        assert values is not None
                        if kept_sums:
                            kept_sums.sums_done(index, stop, values)
                assert values is not None
                fixed[index] = statistic.fixed(network[index], values).eval()
        return fixed

    def _prefix(self, network: Network, stop: int) -> Pipe | None:
        """The first `stop` layers, on the devices that they are on in the whole network."""
        useless = unjoined(self.layers, stop)
        modules = [
            # A stash that is never popped would keep its map until the tile is done.
            nn.Identity() if index in useless else module
            for index, module in enumerate(list(network)[:stop])
        ]
        if not modules:
            return None
        balance: list[int] = []
        for size in self.balance:
            balance.append(min(size, stop - sum(balance)))
        balance = [size for size in balance if size > 0]
        prefix = placed_network(Network(modules, network.mask_key), self.layers, balance)
        return Pipe(
            prefix.eval(),
            balance,
            self.devices[: len(balance)],
            precision=self.precision,
            inline=True,
        )


def _tile_values(
    statistic: Statistic, pipe: Pipe | None, x: Tensor, origin: Origin, where: AveragedOver
) -> Values:
    with torch.inference_mode():
        if pipe is not None:
            (x,) = pipe([x], [origin])
        return statistic.find(x, where)


def _gathered(values: Values | None, statistic: Statistic, comm: Intracomm) -> NDArray[np.float64]:
    """The values of all ranks, in their order; None counts as zeros."""
    own = np.zeros(statistic.num_values) if values is None else values
    everything = np.empty((comm.size, own.size))
    comm.Allgather(np.ascontiguousarray(own), everything)
    return everything


def _own_cells(layers: tuple[Layer, ...], index: int, tiling: Tiling) -> list[AveragedOver]:
    """Return the cells of the layer's input that each tile owns, and their place in the map."""
    rows, cols = (axis[index] for axis in tiling_shares(layers, tiling))
    averaged = []
    for number in range(len(tiling.tiles)):
        row, col = divmod(number, tiling.grid[1])
        cells = Cells((own_cells(rows, cols, tiling, number),), (0,))
        first = rows.edges[row], cols.edges[col]
        averaged.append(AveragedOver(cells, (first,), (rows.cells, cols.cells)))
    return averaged
