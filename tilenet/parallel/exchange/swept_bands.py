"""Bands of an image that ranks sweep: to the network's end, or to a layer for its statistics.

The statistics that a layer needs depend on the layers before it, so pass k sweeps those before
number k, with the results of earlier passes. Statistics are computed tile by tile and merged in the
order of the tiles, so that they do not depend on the number of ranks.
"""

from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from tilenet.geometry.bands import Band, bands
from tilenet.geometry.layers import Layer
from tilenet.geometry.ownership import AxisShares, tiling_shares
from tilenet.geometry.tiles import Tiling
from tilenet.geometry.windows import Window
from tilenet.model.network import Network
from tilenet.mpi import Intracomm
from tilenet.parallel.exchange.fixed import Statistic, statistic_of
from tilenet.parallel.exchange.halo import HaloChannel, part_of
from tilenet.parallel.exchange.passes import KeptSums, Reads, Values
from tilenet.parallel.exchange.swept import Columns, KeptMaps, Sweep, SweptPart
from tilenet.parallel.exchange.whole_maps import AveragedOver
from tilenet.parallel.health.progress import progress_bar
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.parallel.ranks.comm import agreed


@dataclass(frozen=True)
class ImageSweep:
    """The settings that all sweeps of an image share.

    Attributes:
        layers: The network's layers, or the first of them.
        precision: Precision of the arithmetic, see `Pipe`.
        reads: Function that reads the network's input for windows.
        columns: The columns that this rank holds, if ranks exchange halos; then each step is
            collective, and all ranks raise the error of one that cannot read.
        kept_maps: Maps that sweeps of the whole image hand on to later ones, if they do.
    """

    layers: tuple[Layer, ...]
    precision: str
    reads: Reads
    columns: Columns | None = None
    kept_maps: KeptMaps | None = None

    def before(self, stop: int) -> "ImageSweep":
        """The settings for a sweep of the first `stop` layers."""
        columns = self.columns.before(stop) if self.columns is not None and stop else None
        return replace(self, layers=self.layers[:stop], columns=columns)


def sweep_band(
    image: ImageSweep,
    network: Network,
    tiling: Tiling,
    band: Band,
    owns: Sequence[Window],
    *,
    blank: bool = False,
) -> Generator[Tensor, None, None]:
    """The own cells of a band's tiles in the last layer's map, one tile after another.

    Args:
        network: The network of `image.layers`, in evaluation mode, on the device of `image.reads`.
        owns: Window of that map which each tile owns, counted on the whole map.
        blank: Whether the image is not read if no layer needs it, since maps are kept.

    Yields:
        (1, C, H, W).
    """
    layers, reads, columns, kept_maps = image.layers, image.reads, image.columns, image.kept_maps
    if not layers:  # the map is the image itself
        with reads(owns) as images:
            yield from images
        return
    part = band.part
    edges = [*(span.first - part.row for span in band.strips), part.height]
    whole = part if columns is None else Window(part.row, 0, part.height, tiling.extended[1])
    swept = SweptPart(tiling.extended, edges, whole)
    sweep = Sweep(layers, network, swept, image.precision, columns)
    if kept_maps is not None and whole == Window(0, 0, *tiling.extended):
        sweep.use(kept_maps)
    (done, left), pieces = sweep.starts[-1], list[Tensor]()
    first, comm = done, None if columns is None else columns.channel.comm
    reads = reads if sweep.reads_image or not blank else sweep.blanks  # alike on all ranks
    with reads([Window(s.first, part.col, s.own, part.width) for s in band.strips]) as images:

        def read() -> Tensor | None:
            # A file may be broken where only one rank reads it, and others wait for its halos.
            with nullcontext() if comm is None else agreed(comm):
                return next(images, None)

        for own in owns:
            while done < own.row + own.height:
                pieces.append(sweep.feed(read()))
                done += pieces[-1].shape[2]
            rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
            yield part_of(rows, own, first, left)
            first = own.row + own.height
            pieces = [rows[:, :, first - done :].clone()] if first < done else []


def columns_of(layers: tuple[Layer, ...], tiling: Tiling, comm: Intracomm) -> Columns | None:
    """The columns that a rank sweeps, if columns exchange halos."""
    if not tiling.rule.exchanged:
        return None
    return Columns(tiling_shares(layers, tiling)[1], comm.rank, HaloChannel(comm))


def sweep_statistics(
    image: ImageSweep,
    network: Network,
    passes: Sequence[tuple[int, Tiling]],
    comm: Intracomm,
    watchdog: Watchdog,
    kept_sums: KeptSums | None = None,
    *,
    brief: bool = False,
) -> Network:
    """Return the same network with fixed statistics. Collective.

    Args:
        image: Settings of the sweeps; afterwards it holds the kept maps of the last pass.
        network: The network, in evaluation mode, on the device of `image.reads`.
        passes: See `StatisticPasses.run`.
        kept_sums: Storage of the sums of passes that an interrupted run finished, and of new ones.
        brief: Whether progress is shown only if it takes long.

    Raises:
        AgreedError: On all ranks: one of them cannot read a file.
    """
    fixed = Network(list(network), network.mask_key).eval()
    layers, maps = image.layers, image.kept_maps
    total = sum(len(tiling.tiles) for _, tiling in passes)
    with progress_bar(comm, total, "strip", brief=brief) as progress:
        for number, (index, tiling) in enumerate(passes):
            statistic, count = statistic_of(layers[index]), len(tiling.tiles)
            known, values = kept_sums.sums(index) if kept_sums else (0, None)
            if values is None or known < count:
                shares = bands(tiling, range(count), comm.size)
                prefix = Network(list(fixed)[:index], network.mask_key).eval()
                tiles = _tile_values(image, prefix, index, tiling, shares[comm.rank])
                own_values: list[Values] = []
                rounds = max(sum(len(band.tiles) for band in share) for share in shares)
                with closing(tiles) as own_tiles:
                    for turn in range(rounds):
                        doing = f"statistics of layer {index}, pass {number + 1} of {len(passes)}"
                        watchdog.arm(f"{doing}, round {turn}", 1.0 if number or turn else SLOW)
                        with agreed(comm):  # a file may be broken where only one rank reads it
                            own_values += islice(own_tiles, 1)
                        progress.update(min(comm.size, count - turn * comm.size))
                        if kept_sums and turn + 1 < rounds:
                            kept_sums.round_done()
                if maps is not None:
                    maps.finish(index)
                values = _merged(statistic, shares, own_values, comm)
                if kept_sums:
                    kept_sums.sums_done(index, count, values)
            fixed[index] = statistic.fixed(network[index], values).eval()
    return fixed


def _tile_values(
    image: ImageSweep, prefix: Network, index: int, tiling: Tiling, share: Sequence[Band]
) -> Generator[Values, None, None]:
    """The contribution of each of a rank's tiles to the statistic of layer `index`.

    It is zeros for a tile without own cells, as at the edges of a map that is smaller than the
    image.
    """
    rows, cols = (axis[index] for axis in tiling_shares(image.layers, tiling))
    whole, statistic = (rows.cells, cols.cells), statistic_of(image.layers[index])
    for band in share:
        owns = [_own(rows, cols, divmod(number, tiling.grid[1])) for number in band.tiles]
        # If columns exchange halos, all ranks sweep every row in which any of them has cells.
        some = [own for own in owns if own.height and (own.width or image.columns is not None)]
        maps = sweep_band(image.before(index), prefix, tiling, band, some, blank=True)
        with closing(maps):
            for own in owns:
                cells = next(maps) if own in some else None
                if cells is None or not cells.numel():
                    yield np.zeros(statistic.num_values)
                    continue
                where = AveragedOver.part(cells, (own.row, own.col), whole)
                with torch.inference_mode():
                    yield statistic.find(cells, where)


def _own(rows: AxisShares, cols: AxisShares, place: tuple[int, int]) -> Window:
    (top, bottom), (left, right) = (
        axis.edges[at : at + 2] for axis, at in zip((rows, cols), place, strict=True)
    )
    return Window(top, left, bottom - top, right - left)


def _merged(
    statistic: Statistic,
    shares: Sequence[Sequence[Band]],
    own_values: list[Values],
    comm: Intracomm,
) -> Values:
    """The statistic of all tiles, the same on all ranks."""
    most = max(sum(len(band.tiles) for band in share) for share in shares)
    own = np.zeros((most, statistic.num_values))
    for place, values in enumerate(own_values):
        own[place] = values
    everything = np.empty((comm.size, *own.shape))
    comm.Allgather(own, everything)
    by_tile: dict[int, Values] = {}
    for rank, share in enumerate(shares):
        for place, tile in enumerate(chain.from_iterable(band.tiles for band in share)):
            by_tile[tile] = everything[rank, place]
    total = np.zeros(statistic.num_values)
    for _, values in sorted(by_tile.items()):
        if values.any():
            total = statistic.merged(total, values) if total.any() else values
    return total
