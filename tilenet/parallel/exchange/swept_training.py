"""Training by sweeps of a rank's part of an image, with averages of the whole image first.

An average of the whole image is computed by a sweep of the layers before it, with the averages
before it fixed, and is an input of the later sweeps: so backward goes through the sweeps from the
last to the first, each strip by strip. A sweep costs one more forward pass, whatever the halo, and
the memory of one strip and all states.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tilenet.geometry.halo import summed_cells
from tilenet.geometry.layers import GlobalPool, Layer
from tilenet.geometry.maps import map_grids, map_shapes
from tilenet.geometry.ownership import tiling_shares
from tilenet.geometry.sweep import Rows, Sweeps, maps_before, sweep
from tilenet.geometry.tiles import Tile, owned
from tilenet.geometry.windows import Window, overlap
from tilenet.model.network import Network
from tilenet.model.origin import Origin
from tilenet.model.upload import upload
from tilenet.parallel.exchange.fixed import FixedPool
from tilenet.parallel.exchange.halo import HaloChannel
from tilenet.parallel.exchange.swept import Columns, KeptMaps, Sweep, SweptPart
from tilenet.parallel.exchange.swept_backward import Inputs, OfRows, swept_sum
from tilenet.parallel.exchange.swept_partitions import (
    SweptLayers,
    idle_share,
    swept_over_partitions,
)
from tilenet.parallel.exchange.whole_maps import AveragedOver, bin_counts, bin_sums
from tilenet.parallel.sums.all_reduce import sum_with_gradient

# The term that the logits (1, K, H, W) of a window of the image add to a sum; differentiable.
Measure = Callable[[Tensor, Window], Tensor]


class SweptPipe:
    """A network that sweeps its tiles, in place of a `Pipe`.

    Args:
        network: The network; it keeps its parameters and their names, moved to the devices.
        layers: The network's layers.
        devices: One device per partition; they may repeat.
        precision: Precision of the arithmetic, see `Pipe`.
        sweeps: Function that returns the sweeps of a tile with so many rows and columns.
        channel: The channel to the ranks of an image; each holds columns of it if tiles have no
            halo.
        balance: Layers per partition, if there are several; the layers need no averages then.

    Raises:
        TilenetError: A layer needs statistics of the whole image other than averages.
    """

    def __init__(
        self,
        network: Network,
        layers: tuple[Layer, ...],
        devices: Sequence[torch.device],
        precision: str,
        sweeps: Callable[[int, int], Sweeps],
        channel: HaloChannel | None = None,
        *,
        balance: Sequence[int] = (),
    ) -> None:
        self.network, self.devices = network, tuple(devices)
        ends = [0, *accumulate(balance or [len(layers)])]
        self.parts = [range(first, stop) for first, stop in pairwise(ends)]
        for part, placed_on in zip(self.parts, self.devices, strict=True):
            for number in part:
                network[number].to(placed_on)
        self.layers, self.precision, self.sweeps, self.channel = layers, precision, sweeps, channel

    def passes(self, micro_batches: int) -> int:
        """Return how many times one backward adds to each parameter's gradient."""
        return 1

    def idle_share(self, tile: Window) -> float:
        """Return the share of time that a partition waits for strips of such a tile."""
        edges = self.sweeps(tile.height, tile.width).edges
        return idle_share(sum(1 for _ in sweep(self.layers, edges)), len(self.parts))

    def __call__(self, image: Tensor, origin: Origin, measure: Measure) -> Tensor:
        """Sweep a tile, and add up the measure of the pixels that it owns.

        Collective over the ranks of an image if they hold columns of it, as is backward.

        Args:
            image: The pixels that the tile reads, (1, bands, H, W).
            origin: Image and number of the tile.
            measure: Measure, called for the own pixels of each strip, and once more in backward.
        """
        part = _Part(self, upload(image, self.devices[0]), origin)
        averages: dict[int, Tensor] = {}
        for number in summed_cells(self.layers):
            layer = self.layers[number]
            if isinstance(layer, GlobalPool):
                averages[number] = part.average(number, layer, averages)

        def of_own(logits: Tensor, rows: Rows) -> Tensor | None:
            read = part.tile.read
            strip = Window(read.row + rows[0], read.col, rows[1] - rows[0], read.width)
            own = overlap(part.tile.own, strip) if strip.height else None
            return None if own is None else measure(owned(logits, Tile(strip, own)), own)

        if len(self.parts) > 1:
            return part.sweep_over(of_own)
        return part.sweep(len(self.layers), averages, of_own)


class _Part:
    """The part of an image that a rank sweeps, with the maps kept of it."""

    def __init__(self, pipe: SweptPipe, image: Tensor, origin: Origin) -> None:
        tiling = origin.tiling
        assert tiling is not None
        assert len(image) == 1
        self.pipe, self.image, self.origin, self.size = pipe, image, origin, tiling.extended
        number = origin.tiles[0]
        self.tile = tiling.tiles[number]
        read = self.tile.read
        assert image.shape[2:] == (read.height, read.width)
        # For the widest tile, so that strips of all ranks are the same.
        self.plan = pipe.sweeps(read.height, tiling.largest_read[1])
        self.maps: dict[int, Tensor] = {}  # maps that sweeps have kept
        self.columns: Columns | None = None
        if tiling.rule.exchanged and len(tiling.cols) > 1:
            assert pipe.channel is not None
            self.columns = Columns(tiling_shares(pipe.layers, tiling)[1], number, pipe.channel)

    def sweep(
        self, stop: int, averages: dict[int, Tensor], measure: OfRows, *, keeps_states: bool = True
    ) -> Tensor:
        """Sweep the first `stop` layers, and add up the measure of their map.

        Args:
            averages: Averages of the whole image, by the numbers of the layers that need them.
        """
        pipe, network, layers = self.pipe, self.pipe.network, self.pipe.layers[:stop]
        numbers, modules = tuple(averages), list(network)[:stop]
        columns = self.columns and self.columns.before(stop)
        part = SweptPart(self.size, self.plan.edges, None if columns else self.tile.read)

        def make(inputs: Inputs) -> tuple[Sweep, KeptMaps]:
            network.mask_key.images = self.origin.images
            for number, average in zip(numbers, inputs.averages, strict=True):
                modules[number] = FixedPool(average)
            prefix = Network(modules, network.mask_key)
            sweep = Sweep(layers, prefix, part, pipe.precision, columns, compact=True)
            kept_maps = KeptMaps(self.plan.kept_maps, dict(inputs.maps))
            sweep.use(kept_maps)
            return sweep, kept_maps

        computed, read = maps_before(layers, [stop], self.maps)
        grids = map_grids(layers)
        own = [
            module
            for number, module in enumerate(modules, start=1)
            if number in computed or grids[number].whole
        ]
        inputs = Inputs(
            tuple(averages.values()),
            {number: self.maps[number] for number in sorted(read - {0})},
            Network(own, network.mask_key).trained,
        )
        total, maps = swept_sum(self.image, make, measure, inputs, keeps_states=keeps_states)
        needed = self.plan.kept_maps.get(stop, ())
        self.maps = {n: map_ for n, map_ in (self.maps | maps).items() if n in needed}
        return total

    def sweep_over(self, measure: OfRows) -> Tensor:
        """Sweep all layers over partitions, and add up the measure of the last map."""
        pipe, network, columns = self.pipe, self.pipe.network, self.columns
        part = SweptPart(self.size, self.plan.edges, None if columns else self.tile.read)

        def make() -> list[SweptLayers]:
            network.mask_key.images = self.origin.images
            return [
                SweptLayers(
                    Sweep(
                        pipe.layers, network, part, pipe.precision, columns, compact=True, own=own
                    ),
                    device,
                    Network(list(network)[own.start : own.stop], network.mask_key).trained,
                )
                for own, device in zip(pipe.parts, pipe.devices, strict=True)
            ]

        return swept_over_partitions(self.image, make, measure)

    def average(self, number: int, layer: GlobalPool, averages: dict[int, Tensor]) -> Tensor:
        """A layer's averages of the whole image, (C, bins, bins) in float64. Collective."""
        shape = map_shapes(self.pipe.layers, *self.size)[number]
        left = self.columns.own[number][0] if self.columns else 0
        of_rows = partial(_bins, layer, left, (shape.rows, shape.cols))
        if number == 0:
            total = of_rows(self.image, (0, self.image.shape[2]))
            assert total is not None
        else:
            # If the map is kept, its states are needed as parts of those of a single sweep.
            keeps_states = number in self.plan.kept_maps
            total = self.sweep(number, averages, of_rows, keeps_states=keeps_states)
        total = sum_with_gradient(total, self.columns.channel.comm if self.columns else None)
        return total / upload(bin_counts((shape.rows, shape.cols), layer), total.device)


def _bins(
    layer: GlobalPool, left: int, whole: tuple[int, int], x: Tensor, rows: Rows
) -> Tensor | None:
    """Sums of rows of a map (1, C, H, W) in each of its bins, (C, bins, bins)."""
    if not x.shape[2]:
        return None
    return bin_sums(x, layer, AveragedOver.part(x, (rows[0], left), whole))[0]
