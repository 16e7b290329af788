"""The ranks' work on a map: tiles in turn, or windows of the image at once.

What becomes of it is a sink's business: `tilenet predict` has rank 0 write it, validation counts.

How an image is mapped on the memory that the ranks have: decided alike on all of them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilenet.data.rasters.raster import Raster
from tilenet.geometry.tiles import HaloRule, Tile, Tiling, own_pieces, owned
from tilenet.geometry.windows import Window, overlap
from tilenet.mapping.resume import MapResume
from tilenet.mapping.writer import BLOCK_PX, MapKind, MapWriter
from tilenet.model.inputs import standardise
from tilenet.model.network import Network
from tilenet.model.skips import Origin
from tilenet.parallel.exchange.network import placed_network, spatial_network
from tilenet.parallel.exchange.passes import KeptSums, StatisticPasses
from tilenet.parallel.health.progress import progress_bar
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.ranks.comm import agreed
from tilenet.planning.maps import MapPlan, MapQuestion, choose_map
from tilenet.planning.memory.layer import check_map_sizes
from tilenet.storage.network_json import NetworkRecord

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Computed", "MapJob", "MapSink", "Mapper", "Output", "WritingSink", "decide_map"]

Output = Literal["classes", "logits", "probabilities"]

# What rank 0 takes of another rank's window at once, if the image is shared out over the ranks.
PIECE_PX = BLOCK_PX, 4 * BLOCK_PX

LEVELS = 250  # of a probability in a byte: 255 is nodata


@dataclass(frozen=True)
class Computed:
    """A piece of the map on the rank that computed it.

    Attributes:
        logits: (C, H, W), on the last device.
        valid: Where the image has data, (H, W).
    """

    logits: Tensor
    valid: NDArray[np.bool_]


class MapSink(Protocol):
    """Takes up the pieces of a map, which come in one order on all ranks."""

    def wants(self, rank: int, window: Window) -> bool:
        """Whether this rank has to do with a piece that `rank` computes; asked of each piece."""

    def take(self, rank: int, window: Window, computed: Computed | None) -> None:
        """Take up a piece; `computed` is None if another rank has it."""


@dataclass(frozen=True)
class MapJob:
    """The ranks' work on a map. All methods are collective.

    Attributes:
        at_once: Tiles that a rank has in the pipeline at a time.
        first_rank: Rank that computes the first tile; the others follow in turn.
        brief: Whether progress shows only while it takes long.
        what: Is said before it.
    """

    plan: MapPlan
    mapper: "Mapper"
    network: Network
    balance: tuple[int, ...]
    devices: tuple[torch.device, ...]
    precision: str
    watchdog: Watchdog
    at_once: int = 1
    first_rank: int = 0
    brief: bool = False
    what: str | None = None

    def fix_statistics(self, comm: "MPI.Intracomm", kept: KeptSums | None = None) -> Network:
        """The network whose norms have the image's statistics, where passes are to find them.

        Args:
            kept: As in `StatisticPasses.run`.
        """
        if not self.plan.passes:
            return self.network
        finder = StatisticPasses(
            self.mapper.record.layers,
            self.balance,
            self.devices,
            self.precision,
            lambda w: self.mapper.input(w)[0],
            brief=self.brief,
        )
        return finder.run(self.network, self.plan.passes, comm, self.watchdog, kept)

    def map(
        self,
        network: Network,
        comm: "MPI.Intracomm",
        sink: MapSink,
        resume: MapResume | None = None,
    ) -> None:
        """Compute the map and hand it to the sink.

        Tiles that no rank's sink wants are not computed. Nothing is sent here after a sink was
        first handed a piece, other than by the sink.

        Args:
            resume: Hears of each round of tiles.

        Raises:
            StopAgreed: On all ranks, if `resume` had any of them asked to stop.
        """
        if self.plan.method == "exchange":
            self._share_out(network, comm, sink)
        else:
            placed = placed_network(network, self.mapper.record.layers, self.balance)
            self._tile_by_tile(self._pipe(placed), comm, sink, resume)

    def _pipe(self, network: Network) -> Pipe:
        return Pipe(network, self.balance, self.devices, precision=self.precision, inline=True)

    def wanted(self, comm: "MPI.Intracomm", sink: MapSink) -> list[Tile]:
        """The tiles that have to be computed; not collective."""
        # The rank that computes a tile wants it, so that all ranks make the same list.
        return [tile for tile in self.plan.tiling.tiles if sink.wants(comm.rank, tile.own)]

    def _tile_by_tile(
        self, pipe: Pipe, comm: "MPI.Intracomm", sink: MapSink, resume: MapResume | None
    ) -> None:
        """Compute the tiles in rounds, as many per rank as are in the pipeline at a time."""
        tiles = self.wanted(comm, sink)
        began, pixels = time.monotonic(), 0
        each = comm.size * self.at_once
        place = (comm.rank - self.first_rank) % comm.size
        bar = progress_bar(comm, len(tiles), "tile", brief=self.brief, what=self.what)
        with bar as progress:
            for start in range(0, len(tiles), each):
                # A rank that is ahead waits for rank 0 when it hands on its next tile but one.
                self.watchdog.arm(f"the round of tile {start}", 1.0 if start else SLOW)
                turn = tiles[start : start + each]
                found = self.mapper.tiles(pipe, turn[place :: comm.size])
                for number, tile in enumerate(turn):
                    rank = (number + self.first_rank) % comm.size
                    if sink.wants(rank, tile.own):
                        # Taken off the list, so that logits go as soon as they are taken up.
                        computed = found.pop(0) if rank == comm.rank else None
                        sink.take(rank, tile.own, computed)
                pixels += sum(tile.own.height * tile.own.width for tile in turn)
                speed = pixels / 1e6 / (time.monotonic() - began)
                progress.set_postfix_str(f"{speed:.2g} Mpx/s", refresh=False)
                progress.update(len(turn))
                if resume:
                    resume.tiles_done(turn, last=start + each >= len(tiles))

    def _share_out(self, network: Network, comm: "MPI.Intracomm", sink: MapSink) -> None:
        """Compute all windows at once, one per rank, and hand them on in pieces."""
        tiling, mapper = self.plan.tiling, self.mapper
        spatial = spatial_network(
            network, mapper.record.layers, self.balance, "exchange", comm, comm
        ).eval()
        self.watchdog.arm("the pass over the image", SLOW)
        mine = tiling.tiles[comm.rank].own
        with agreed(comm):
            image, valid = mapper.input(mine)
        with torch.inference_mode():
            (output,) = self._pipe(spatial)([image], [Origin((0,), tiling, (comm.rank,))])
        del image
        spatial.close()
        pieces = list(own_pieces(tiling, *PIECE_PX))
        last = 0
        bar = progress_bar(comm, len(pieces), "piece", brief=self.brief, what=self.what)
        with bar as progress:
            for number, (rank, window) in enumerate(pieces):
                if not sink.wants(rank, window):
                    continue
                # Other ranks wait until rank 0 has taken all pieces before theirs.
                self.watchdog.arm(f"piece {number} of the map", SLOW if not last else number - last)
                last = number
                computed = None
                if rank == comm.rank:
                    place = Tile(mine, window)
                    logits = owned(output, place)[0].to(mapper.dtype)
                    computed = Computed(logits, owned(valid, place))
                sink.take(rank, window, computed)
                progress.update(1)


class WritingSink:
    """Has rank 0 write the map's values, in order; the others send them.

    Args:
        writer: On rank 0.
        window: What the map shows of the image.
        check: Called with each piece on the rank that computed it, before it is written or sent.
        resume: Knows tiles that are done.
    """

    def __init__(
        self,
        mapper: "Mapper",
        comm: "MPI.Intracomm",
        writer: MapWriter | None,
        window: Window,
        check: Callable[[Window, Computed], None],
        resume: MapResume | None = None,
    ) -> None:
        self.mapper, self.comm, self.writer = mapper, comm, writer
        self.window, self.check, self.resume = window, check, resume
        self._sent: tuple[MPI.Request, NDArray[Any]] | None = None

    def wants(self, rank: int, window: Window) -> bool:
        """Rank 0 has to do with all pieces that the map shows, the others with their own."""
        if self.comm.rank not in (0, rank) or overlap(window, self.window) is None:
            return False
        return self.resume is None or not self.resume.is_done(window)

    def take(self, rank: int, window: Window, computed: Computed | None) -> None:
        """Write a piece, or send it."""
        if computed is None:
            kind = self.mapper.kind
            values = np.empty((kind.bands, window.height, window.width), kind.dtype)
            self.comm.Recv(values, source=rank, tag=0)
        else:
            self.check(window, computed)
            values = self.mapper.values(computed)
        if self.writer is None:
            # While rank 0 still computes or writes, this rank goes on with its next piece.
            self.close()
            self._sent = self.comm.Isend(values, dest=0, tag=0), values
        else:
            self.writer.write(window, values)

    def close(self) -> None:
        """Return when rank 0 has all that this rank sent."""
        if self._sent is not None:
            self._sent[0].Wait()
            self._sent = None


class Mapper:
    """Computes what the map holds."""

    def __init__(
        self,
        output: Output,
        record: NetworkRecord,
        image: Raster,
        tiling: Tiling,
        dtype: torch.dtype,
        *,
        scaled: bool = False,
    ) -> None:
        self.output, self.record, self.image = output, record, image
        self.scaled = scaled
        self.dtype = dtype
        self.tiling = tiling
        self.offset_px = tiling.rule.offset_px
        count = len(record.classes)
        if output == "classes":
            kind = "uint8" if count <= 255 else "uint16"
            most = np.iinfo(kind).max
            nodata = record.ignore_index if count <= record.ignore_index <= most else int(most)
            self.kind = MapKind(1, kind, nodata, record.classes)
        elif scaled:
            self.kind = MapKind(count, "uint8", 255, record.classes, 1 / LEVELS)
        else:
            kind = "float64" if dtype == torch.float64 else "float32"
            self.kind = MapKind(count, kind, float("nan"), record.classes)

    def input(self, window: Window) -> tuple[Tensor, NDArray[np.bool_]]:
        """What the network sees of a window, (1, C, H, W), and where there is data, (H, W)."""
        pixels = self.image.read(window)
        mean, std = self.record.mean, self.record.std
        return standardise(pixels.values, pixels.valid, mean, std, self.dtype), pixels.valid

    def tiles(self, pipe: Pipe, tiles: Sequence[Tile]) -> list[Computed]:
        """The tiles' own pixels."""
        if not tiles:
            return []
        images, valid = zip(*(self.input(tile.read) for tile in tiles), strict=True)
        numbers = [self.tiling.number(tile.own) for tile in tiles]
        origins = [
            Origin((0,), self.tiling, (number,), micro_batch)
            for micro_batch, number in enumerate(numbers)
        ]
        with torch.inference_mode():
            outputs = pipe(list(images), origins)
        return [
            Computed(owned(output, tile, self.offset_px)[0].to(self.dtype), owned(where, tile))
            for output, where, tile in zip(outputs, valid, tiles, strict=True)
        ]

    def values(self, computed: Computed) -> NDArray[Any]:
        """The map's values (bands, H, W); nodata where the image has none."""
        logits = computed.logits
        if self.output == "classes":
            values = logits.argmax(dim=0, keepdim=True).cpu().numpy()
        elif self.output == "logits":
            values = logits.cpu().numpy()
        elif self.scaled:
            # In float64, which holds the products: the nearest level, whatever the precision.
            levels = logits.softmax(dim=0).double().mul_(LEVELS).round_()
            values = levels.nan_to_num_(nan=self.kind.nodata).cpu().numpy()
        else:
            values = logits.softmax(dim=0).cpu().numpy()
        values = values.astype(self.kind.dtype)
        values[:, ~computed.valid] = self.kind.nodata
        return np.ascontiguousarray(values)


# Feature maps of a tile may take this much on a CPU; on a GPU, a quarter of what is free. Measured
# peaks are about twice as high: convolutions reorder their input and output.
CPU_BYTES = 256 << 20
# Larger tiles save little work (at a halo of 96 px 1.4× the pixels are read, at 4096 1.1×) but
# cost memory that a GPU has to spare and a node with many CPU ranks has not.
CPU_TILE_PX, GPU_TILE_PX = 1024, 4096


def decide_map(
    record: NetworkRecord,
    size: tuple[int, int],
    rule: HaloRule,
    device: torch.device,
    dtype: torch.dtype,
    comm: "MPI.Intracomm",
    *,
    halo_asked: bool = False,
    tile_px: int | None = None,
    at_once: int = 1,
) -> MapPlan:
    """Decide. Collective.

    Args:
        record: The network.
        size: Height and width of the image.
        rule: The halo.
        device: The rank's first.
        dtype: Dtype of feature maps.
        comm: The ranks that map together.
        halo_asked: Whether another halo than the exact one was asked for.
        tile_px: Largest own size that was asked for; None: as much as memory allows.
        at_once: Tiles of a rank that are in the pipeline at a time.

    Raises:
        AgreedError: The image cannot be mapped so.
    """
    # Ranks that chose for themselves could choose differently.
    budget, most_px = min(comm.allgather(_memory(device)))
    with agreed(comm):
        asked = MapQuestion(
            layers=record.layers,
            size=size,
            rule=rule,
            halo_asked=halo_asked,
            tile_px=tile_px,
            num_ranks=comm.size,
            item_bytes=dtype.itemsize,
            budget_bytes=budget,
            most_px=most_px,
            at_once=at_once,
        )
        plan = choose_map(asked)
        read = plan.tiling.tiles[0].read
        check_map_sizes(record.layers, read.height, read.width)
    return plan


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes for feature maps, and the largest own size of a tile."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        # What torch keeps for later is free for us.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (free + kept) // 4, GPU_TILE_PX
    return CPU_BYTES, CPU_TILE_PX
