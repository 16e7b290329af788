"""The ranks' work on a map: tiles in turn, or windows of the image at once; rank 0 writes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilenet.files.maps import BLOCK_PX, MapKind, MapWriter
from tilenet.files.network_record import NetworkRecord
from tilenet.files.raster import Raster
from tilenet.geometry.pieces import own_pieces
from tilenet.geometry.tiles import Tile, Tiling, Window, owned
from tilenet.model.inputs import standardise
from tilenet.model.network import Network
from tilenet.model.skips import Origin
from tilenet.parallel.mesh import agreed
from tilenet.parallel.pipeline import Pipe
from tilenet.parallel.progress import progress_bar
from tilenet.parallel.spatial_network import spatial_network
from tilenet.parallel.statistic_passes import StatisticPasses
from tilenet.parallel.watchdog import SLOW, Watchdog
from tilenet.planning.map_plan import MapPlan

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MapJob", "Mapper", "Output"]

Output = Literal["classes", "logits", "probabilities"]

# What rank 0 takes of another rank's window at once, if the image is shared out over the ranks.
PIECE_PX = BLOCK_PX, 4 * BLOCK_PX


@dataclass(frozen=True)
class MapJob:
    """The ranks' work on a map. All methods are collective."""

    plan: MapPlan
    mapper: "Mapper"
    network: Network
    balance: tuple[int, ...]
    devices: tuple[torch.device, ...]
    precision: str
    watchdog: Watchdog

    def fix_statistics(self, comm: "MPI.Intracomm") -> Network:
        """The network whose norms have the image's statistics, where passes are to find them."""
        if not self.plan.passes:
            return self.network
        layers = self.mapper.record.layers
        finder = StatisticPasses(
            layers, self.balance, self.devices, self.precision, lambda w: self.mapper.input(w)[0]
        )
        return finder.run(self.network, self.plan.passes, comm, self.watchdog)

    def map(self, network: Network, comm: "MPI.Intracomm", writer: MapWriter | None) -> None:
        """Compute the map and have rank 0 write it."""
        if self.plan.method == "exchange":
            self._share_out(network, comm, writer)
        else:
            self._tile_by_tile(self._pipe(network), comm, writer)

    def _pipe(self, network: Network) -> Pipe:
        return Pipe(network, self.balance, self.devices, precision=self.precision, inline=True)

    def _tile_by_tile(self, pipe: Pipe, comm: "MPI.Intracomm", writer: MapWriter | None) -> None:
        """Compute the tiles in rounds, one per rank, and hand them to rank 0 in order."""
        tiles = self.plan.tiling.tiles
        progress = progress_bar(comm, len(tiles), "tile")
        for start in range(0, len(tiles), comm.size):
            # A rank that is ahead waits in its next Send for rank 0, at most a round.
            self.watchdog.arm(f"the round of tile {start}", 1.0 if start else SLOW)
            stop = min(start + comm.size, len(tiles))
            mine = start + comm.rank
            values = self.mapper.tile(pipe, tiles[mine]) if mine < stop else None
            if writer is None:
                if values is not None:
                    comm.Send(values, dest=0, tag=0)
                continue
            assert values is not None, "rank 0 has a tile in every round"
            writer.write(tiles[mine].own, values)
            for number in range(start + 1, stop):
                self._receive(tiles[number].own, number - start, comm, writer)
            progress.update(stop - start)
        progress.close()

    def _share_out(self, network: Network, comm: "MPI.Intracomm", writer: MapWriter | None) -> None:
        """Compute all windows at once, one per rank, and hand them to rank 0 in pieces."""
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
        pieces = list(own_pieces(tiling, *PIECE_PX))
        progress = progress_bar(comm, len(pieces), "piece")
        last = 0
        for number, (rank, window) in enumerate(pieces):
            if comm.rank not in (0, rank):
                continue
            # Other ranks wait until rank 0 has taken all pieces before theirs.
            self.watchdog.arm(f"piece {number} of the map", SLOW if not last else number - last)
            last = number
            if rank != comm.rank:
                assert writer is not None
                self._receive(window, rank, comm, writer)
            else:
                place = Tile(mine, window)
                values = mapper.values(owned(output, place)[0], owned(valid, place))
                if writer is None:
                    comm.Send(values, dest=0, tag=0)
                else:
                    writer.write(window, values)
            progress.update(1)
        progress.close()
        spatial.close()

    def _receive(self, window: Window, rank: int, comm: "MPI.Intracomm", writer: MapWriter) -> None:
        kind = self.mapper.kind
        received = np.empty((kind.bands, window.height, window.width), kind.dtype)
        comm.Recv(received, source=rank, tag=0)
        writer.write(window, received)


class Mapper:
    """Computes what the map holds."""

    def __init__(
        self,
        output: Output,
        record: NetworkRecord,
        image: Raster,
        tiling: Tiling,
        dtype: torch.dtype,
    ) -> None:
        self.output, self.record, self.image = output, record, image
        self.dtype = dtype
        self.offset_px = tiling.rule.offset_px
        count = len(record.classes)
        if output == "classes":
            kind = "uint8" if count <= 255 else "uint16"
            most = np.iinfo(kind).max
            nodata = record.ignore_index if count <= record.ignore_index <= most else int(most)
            self.kind = MapKind(1, kind, nodata, record.classes)
        else:
            kind = "float64" if dtype == torch.float64 else "float32"
            self.kind = MapKind(count, kind, float("nan"), record.classes)

    def input(self, window: Window) -> tuple[Tensor, NDArray[np.bool_]]:
        """What the network sees of a window, (1, C, H, W), and where there is data, (H, W)."""
        pixels = self.image.read(window)
        mean, std = self.record.mean, self.record.std
        return standardise(pixels.values, pixels.valid, mean, std, self.dtype), pixels.valid

    def tile(self, pipe: Pipe, tile: Tile) -> NDArray[Any]:
        """Values of the tile's own pixels, (bands, H, W)."""
        image, valid = self.input(tile.read)
        with torch.inference_mode():
            (output,) = pipe([image], [Origin(())])
        return self.values(owned(output, tile, self.offset_px)[0], owned(valid, tile))

    def values(self, logits: Tensor, valid: NDArray[np.bool_]) -> NDArray[Any]:
        """From logits (C, H, W) to the map's values (bands, H, W); nodata where not `valid`."""
        logits = logits.to(self.dtype)
        if self.output == "classes":
            values = logits.argmax(dim=0, keepdim=True).cpu().numpy()
        elif self.output == "logits":
            values = logits.cpu().numpy()
        else:
            values = logits.softmax(dim=0).cpu().numpy()
        values = values.astype(self.kind.dtype)
        values[:, ~valid] = self.kind.nodata
        return np.ascontiguousarray(values)
