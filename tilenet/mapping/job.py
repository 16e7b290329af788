"""The ranks' work on a map: bands in strips, tiles in turn, or windows of the image at once.

A sink takes the results: that of `tilenet predict` writes them, that of validation counts pixels.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from tilenet.geometry.bands import bands
from tilenet.geometry.tiles import Tile, own_pieces, owned
from tilenet.mapping.mapper import Computed, Mapper, MapSink
from tilenet.mapping.turns import SumsOfTurn, Turn, mean_of_turns
from tilenet.mapping.writing.resume import MapResume
from tilenet.mapping.writing.tiff_header import BLOCK_PX
from tilenet.model.network import Network
from tilenet.model.origin import Origin
from tilenet.mpi import Intracomm
from tilenet.parallel.exchange.network import placed_network, spatial_network
from tilenet.parallel.exchange.passes import KeptSums, StatisticPasses
from tilenet.parallel.exchange.swept import KeptMaps
from tilenet.parallel.exchange.swept_bands import (
    ImageSweep,
    columns_of,
    sweep_statistics,
)
from tilenet.parallel.health.progress import progress_bar
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.ranks.comm import agreed
from tilenet.planning.maps.question import MapPlan

# Rows and columns of a rank's window that sinks take at once, if ranks share the image.
PIECE_PX = BLOCK_PX, 4 * BLOCK_PX


@dataclass(frozen=True)
class Placement:
    """A network's partitions on the devices of a rank.

    Attributes:
        balance: Layers per partition.
        devices: One device per partition.
        precision: Precision of the arithmetic, as for `Pipe`.
    """

    balance: tuple[int, ...]
    devices: tuple[torch.device, ...]
    precision: str


@dataclass(frozen=True)
class MapJob:
    """The ranks' work on a map. All methods are collective.

    Attributes:
        at_once: Tiles that a rank has in the pipeline at a time.
        what: Name of the work in front of its progress; None: shown only while it takes long.
        turns: Turned images to average the scores of, tile by tile; (): the image alone.
        maps: Maps that the passes of a sweep for statistics keep for the pass that maps.
    """

    plan: MapPlan
    mapper: Mapper
    network: Network
    placement: Placement
    watchdog: Watchdog
    at_once: int = 1
    what: str | None = None
    turns: tuple[Turn, ...] = ()
    maps: KeptMaps = field(default_factory=KeptMaps, init=False)

    def fix_statistics(
        self, comm: Intracomm, kept_sums: KeptSums | None = None
    ) -> tuple[Network, ...]:
        """Compute the image's statistics in passes, where norms need them, and fix them.

        Args:
            kept_sums: See `StatisticPasses.run`.

        Returns:
            The network with these statistics, or one network for each turned image.
        """
        if not self.turns:
            return (self._find_statistics(comm, kept_sums),)
        layers = len(self.mapper.record.layers)
        return tuple(
            replace(self, plan=turn.plan, mapper=turn.mapper, turns=())._find_statistics(
                comm, kept_sums and SumsOfTurn(kept_sums, number * layers)
            )
            for number, turn in enumerate(self.turns)
        )

    def _find_statistics(self, comm: Intracomm, kept_sums: KeptSums | None) -> Network:
        if not self.plan.passes:
            return self.network
        placement, brief = self.placement, self.what is None
        reads = partial(self.mapper.images, placement.devices[0], lambda valid: None)
        if self.plan.method == "sweep":
            layers = [index for index, _ in self.plan.passes]
            self.maps.after = dict(zip(layers, self.plan.kept_maps, strict=True))
            columns = columns_of(self.mapper.record.layers, self.plan.passes[0][1], comm)
            image = ImageSweep(
                self.mapper.record.layers, placement.precision, reads, columns, self.maps
            )
            network = self.network.to(placement.devices[0])
            passes = self.plan.passes
            return sweep_statistics(
                image, network, passes, comm, self.watchdog, kept_sums, brief=brief
            )
        finder = StatisticPasses(
            self.mapper.record.layers,
            placement.balance,
            placement.devices,
            placement.precision,
            reads,
            brief=brief,
        )
        return finder.run(self.network, self.plan.passes, comm, self.watchdog, kept_sums)

    def map(
        self,
        networks: Sequence[Network],
        comm: Intracomm,
        sink: MapSink,
        resume: MapResume | None = None,
        first_rank: int = 0,
    ) -> None:
        """Compute the map by the networks of `fix_statistics` and hand it to the sink.

        Tiles that no rank's sink wants are not computed. Nothing is sent here after a sink was
        first handed a piece, other than by the sink.

        Args:
            resume: Hears of each round of tiles.
            first_rank: Rank that computes the first of tiles; the others follow in turn.

        Raises:
            StopAgreed: On all ranks, if `resume` had any of them asked to stop.
        """
        if self.plan.method == "exchange":
            self._map_shares(networks[0], comm, sink)
        elif self.plan.method == "sweep":
            self._map_strips(networks[0], comm, sink, resume)
        else:
            if self.plan.method != "windows":
                layers, balance = self.mapper.record.layers, self.placement.balance
                networks = [placed_network(network, layers, balance) for network in networks]
            pipes = [self._make_pipe(network) for network in networks]
            self._map_tiles(pipes, comm, sink, resume, first_rank)

    def _make_pipe(self, network: Network) -> Pipe:
        at = self.placement
        return Pipe(network, at.balance, at.devices, precision=at.precision, inline=True)

    def list_tiles(self, comm: Intracomm, sink: MapSink) -> list[Tile]:
        """The tiles that have to be computed; not collective."""
        # The rank that computes a tile wants it, so that all ranks make the same list.
        return [tile for tile in self.plan.tiling.tiles if sink.wants(comm.rank, tile.own)]

    @contextmanager
    def _start_computing(
        self, pipes: Sequence[Pipe], mine: Sequence[Tile]
    ) -> Iterator[Callable[[list[Tile]], list[Computed]]]:
        """Yield a function that computes tiles of this rank in turn; a thread reads ahead."""
        if self.turns:
            with mean_of_turns(self.turns, pipes, mine) as mean:
                yield mean
            return
        with self.mapper.inputs([tile.read for tile in mine], self.at_once) as inputs:
            yield lambda tiles: self.mapper.tiles(pipes[0], tiles, inputs)

    def _map_tiles(
        self,
        pipes: Sequence[Pipe],
        comm: Intracomm,
        sink: MapSink,
        resume: MapResume | None,
        first_rank: int,
    ) -> None:
        """Compute the tiles in rounds, as many per rank as are in the pipeline at a time."""
        tiles = self.list_tiles(comm, sink)
        began, pixels = time.monotonic(), 0
        each = comm.size * self.at_once
        place = (comm.rank - first_rank) % comm.size
        # Each round holds as many per rank.
        mine = tiles[place :: comm.size]
        bar = progress_bar(comm, len(tiles), "tile", brief=self.what is None, what=self.what)
        with bar as progress, self._start_computing(pipes, mine) as compute:
            for start in range(0, len(tiles), each):
                # A rank that is ahead waits for the others to begin the round before.
                self.watchdog.arm(f"the round of tile {start}", 1.0 if start else SLOW)
                turn = tiles[start : start + each]
                computed_tiles = compute(turn[place :: comm.size])
                for number, tile in enumerate(turn):
                    rank = (number + first_rank) % comm.size
                    if sink.wants(rank, tile.own):
                        # Taken off the list, so that logits go as soon as they are taken up.
                        computed = computed_tiles.pop(0) if rank == comm.rank else None
                        sink.take(rank, tile.own, computed)
                pixels += sum(tile.own.height * tile.own.width for tile in turn)
                speed = pixels / 1e6 / (time.monotonic() - began)
                progress.set_postfix_str(f"{speed:.2g} Mpx/s", refresh=False)
                progress.update(len(turn))
                if resume:
                    resume.tiles_done(last=start + each >= len(tiles))

    def _map_strips(
        self, network: Network, comm: Intracomm, sink: MapSink, resume: MapResume | None
    ) -> None:
        """Sweep the ranks' bands side by side, and hand on a tile of each rank in turn."""
        tiling = self.plan.tiling
        tiles = tiling.tiles
        numbers = [tiling.number(tile.own) for tile in self.list_tiles(comm, sink)]
        shares = bands(tiling, numbers, comm.size)
        turns = [[number for band in share for number in band.tiles] for share in shares]
        device, precision = self.placement.devices[0], self.placement.precision
        network = network.to(device).eval()
        halo_comm = comm.Dup()  # halos are sent while sinks send pieces
        columns = columns_of(self.mapper.record.layers, tiling, halo_comm)

        def strips() -> Generator[Computed, None, None]:
            for band in shares[comm.rank]:
                yield from self.mapper.strips(network, band, device, precision, columns, self.maps)

        rounds = max(len(turn) for turn in turns)
        bar = progress_bar(comm, len(numbers), "strip", brief=self.what is None, what=self.what)
        with bar as progress, closing(strips()) as mine:
            for number in range(rounds):
                self.watchdog.arm(f"round {number} of strips", 1.0 if number else SLOW)
                computed = next(mine, None)
                done = [
                    (rank, turn[number]) for rank, turn in enumerate(turns) if number < len(turn)
                ]
                for rank, tile in done:
                    if sink.wants(rank, tiles[tile].own):
                        sink.take(rank, tiles[tile].own, computed if rank == comm.rank else None)
                progress.update(len(done))
                if resume:
                    resume.tiles_done(last=number + 1 == rounds)
        self.maps.maps.clear()
        halo_comm.Free()

    def _map_shares(self, network: Network, comm: Intracomm, sink: MapSink) -> None:
        """Compute all windows at once, one per rank, and hand them on in pieces."""
        tiling, mapper = self.plan.tiling, self.mapper
        spatial = spatial_network(
            network, mapper.record.layers, self.placement.balance, "exchange", comm, comm
        ).eval()
        self.watchdog.arm("the pass over the image", SLOW)
        mine = tiling.tiles[comm.rank].own
        with agreed(comm):
            image, valid = mapper.input(mine)
        with torch.inference_mode():
            (output,) = self._make_pipe(spatial)([image], [Origin((0,), tiling, (comm.rank,))])
        del image
        spatial.close()
        pieces = list(own_pieces(tiling, *PIECE_PX))
        last = 0
        bar = progress_bar(comm, len(pieces), "piece", brief=self.what is None, what=self.what)
        with bar as progress:
            for number, (rank, window) in enumerate(pieces):
                progress.update(1)
                if not sink.wants(rank, window):
                    continue
                # Where rank 0 keeps the map, it first takes all pieces before this one.
                self.watchdog.arm(f"piece {number} of the map", SLOW if not last else number - last)
                last = number
                computed = None
                if rank == comm.rank:
                    place = Tile(mine, window)
                    logits = owned(output, place)[0].to(mapper.dtype)
                    computed = Computed(logits, owned(valid, place))
                sink.take(rank, window, computed)
