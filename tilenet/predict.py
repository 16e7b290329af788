"""Raster in, map out: ranks compute tiles in turn, rank 0 writes them, memory stays bounded."""

import resource
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tilenet.errors import TilenetError
from tilenet.files.maps import MapKind, MapWriter, check_target
from tilenet.files.network_record import NetworkRecord
from tilenet.files.raster import Raster
from tilenet.files.weights import find_checkpoint, load_json, load_tensors
from tilenet.geometry.halo import norm_context
from tilenet.geometry.layers import Norm
from tilenet.geometry.tiles import (
    Cut,
    HaloRule,
    Tile,
    Tiling,
    check_norms,
    cut,
    halo_rule,
    owned,
)
from tilenet.model.inputs import standardise
from tilenet.model.network import build_network, load_weights
from tilenet.model.skips import Origin
from tilenet.parallel.job_layout import say_layout
from tilenet.parallel.mesh import agreed, choose_devices, node_place, world
from tilenet.parallel.pipeline import Pipe
from tilenet.parallel.progress import progress_bar, say
from tilenet.parallel.watchdog import SLOW, Watchdog
from tilenet.planning.balance import check_balance, likely_balance
from tilenet.planning.layer_bytes import check_map_sizes
from tilenet.planning.memory import inference_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Prediction", "predict"]

Output = Literal["classes", "logits", "probabilities"]

# Feature maps of a tile may take this much on a CPU; on a GPU, a quarter of what is free. Measured
# peaks are about twice as high: convolutions reorder their input and output.
CPU_BYTES = 256 << 20
# Larger tiles save little work (at a halo of 96 px 1.4× the pixels are read, at 4096 1.1×) but
# cost memory that a GPU has to spare and a node with many CPU ranks has not.
CPU_TILE_PX, GPU_TILE_PX = 1024, 4096


@dataclass(frozen=True)
class Prediction:
    """What to map and how.

    Attributes:
        checkpoint: A checkpoint's folder, or a training run's.
        image: Any raster with the bands that the network reads.
        out: The map's path.
        output: Class numbers, or one band per class of logits or probabilities.
        tile_px: Largest own size; None: as much as memory allows.
        halo: `exact`, `epsilon` or pixels.
        precision: None: that of the training run.
        device: `auto`, `cpu` or `cuda`, or a list with one device per partition.
        partitions: Devices per rank.
        balance: Layers per partition; None: the fastest by the roofline.
        nodata: As in run files; None: as in training.
        overwrite: Whether an existing map may be replaced.
        hang_seconds: End the job when a round of tiles takes longer; 0: never.
    """

    checkpoint: str
    image: str
    out: str
    output: Output = "classes"
    tile_px: int | None = None
    halo: int | str = "exact"
    precision: str | None = None
    device: str | list[str] = "auto"
    partitions: int = 1
    balance: tuple[int, ...] | None = None
    nodata: float | str | None = None
    overwrite: bool = False
    hang_seconds: float = 1800.0


def predict(wanted: Prediction, comm: "MPI.Intracomm | None" = None) -> dict[str, Any]:
    """Make a map of an image. Collective: all ranks of `comm`, None: of the job, call it.

    Returns:
        What was done: tiles, their sizes, and the peak resident memory of each rank in bytes.

    Raises:
        AgreedError: On all ranks, for what any rank found wrong before the first tile.
        TilenetError: On one rank, for a file that breaks later.
    """
    comm = world() if comm is None else comm
    place = node_place(comm, wanted.device)
    with ExitStack() as stack:
        with agreed(comm):
            if comm.rank == 0:
                check_target(wanted.out, overwrite=wanted.overwrite, image=wanted.image)
            folder = find_checkpoint(Path(wanted.checkpoint))
            record = NetworkRecord.from_json(load_json(folder / "network.json"))
            nodata = record.nodata if wanted.nodata is None else wanted.nodata
            image = stack.enter_context(
                Raster(wanted.image, record.bands, record.resolution, nodata)
            )
            if isinstance(wanted.device, list) and len(wanted.device) != wanted.partitions:
                raise TilenetError(
                    f"a list of devices names one per partition (device: {wanted.device}, "
                    f"partitions: {wanted.partitions}); one device may be named several times"
                )
            devices = choose_devices(wanted.device, place, wanted.partitions)
            watchdog = Watchdog(wanted.hang_seconds, f"rank {comm.rank} of {comm.size}")
            precision = wanted.precision or record.precision
            dtype = torch.float64 if precision == "float64" else torch.float32
            network = build_network(record.layers, dtype=dtype)
            load_weights(network, load_tensors(folder / "weights.safetensors"), str(folder))
            rule = halo_rule(wanted.halo, record.context(), record.layers, record.epsilon_px)
            asked = _cut(wanted, record, rule, dtype, devices[0])
            tiling = cut(image.height, image.width, asked, rule)
            if any(isinstance(n, Norm) and n.norm != "batch" for n in record.layers):
                check_norms(record.layers, tiling.tiles[0].read)
            read = tiling.tiles[0].read
            check_map_sizes(record.layers, read.height, read.width)
            balance = wanted.balance or likely_balance(
                record.layers, (read.height, read.width), wanted.partitions
            )
            check_balance(balance, len(record.layers), wanted.partitions)
        say_layout(comm, place, devices)
        network.eval()
        pipe = Pipe(network, balance, devices, precision=precision, inline=True)
        mapper = _Mapper(wanted.output, record, image, pipe, tiling, dtype)
        if comm.rank == 0:
            _announce(tiling, record, wanted)
            with MapWriter(wanted.out, image, mapper.kind) as writer:
                with watchdog:
                    _map(tiling, mapper, comm, writer, watchdog)
                writer.finish()
        else:
            with watchdog:
                _map(tiling, mapper, comm, None, watchdog)
        # Also a barrier: no rank says that it is done before the map stands in its place.
        peaks = comm.allgather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return {
        "map": wanted.out,
        "size": list(image.size),
        "grid": list(tiling.grid),
        "tile_own_px": max(span.own for span in (*tiling.rows, *tiling.cols)),
        "halo_px": rule.halo_px,
        "work_ratio": tiling.work_ratio,
        "peak_bytes": peaks,
    }


def _map(
    tiling: Tiling,
    mapper: "_Mapper",
    comm: "MPI.Intracomm",
    writer: MapWriter | None,
    watchdog: Watchdog,
) -> None:
    """Compute the tiles in rounds, one per rank, and hand them to rank 0 in order."""
    tiles = tiling.tiles
    progress = progress_bar(comm, len(tiles), "tile")
    for start in range(0, len(tiles), comm.size):
        # A rank that is ahead waits in its next Send for rank 0, at most a round.
        watchdog.arm(f"the round of tile {start}", 1.0 if start else SLOW)
        stop = min(start + comm.size, len(tiles))
        mine = start + comm.rank
        values = mapper.tile(tiles[mine]) if mine < stop else None
        if writer is None:
            if values is not None:
                comm.Send(values, dest=0, tag=0)
            continue
        assert values is not None, "rank 0 has a tile in every round"
        writer.write(tiles[mine].own, values)
        for number in range(start + 1, stop):
            own = tiles[number].own
            received = np.empty((mapper.kind.bands, own.height, own.width), mapper.kind.dtype)
            comm.Recv(received, source=number - start, tag=0)
            writer.write(own, received)
        progress.update(stop - start)
    progress.close()


class _Mapper:
    """Computes what the map holds on a tile's own pixels."""

    def __init__(
        self,
        output: Output,
        record: NetworkRecord,
        image: Raster,
        pipe: Pipe,
        tiling: Tiling,
        dtype: torch.dtype,
    ) -> None:
        self.output, self.record, self.image, self.pipe = output, record, image, pipe
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

    def tile(self, tile: Tile) -> NDArray[Any]:
        """Values of the tile's own pixels, (bands, H, W), nodata where the image has none."""
        pixels = self.image.read(tile.read)
        record = self.record
        image = standardise(pixels.values, pixels.valid, record.mean, record.std, self.dtype)
        with torch.inference_mode():
            (output,) = self.pipe([image], [Origin(())])
        logits = owned(output, tile, self.offset_px)[0]
        logits = logits.to(self.dtype)
        if self.output == "classes":
            values = logits.argmax(dim=0, keepdim=True).cpu().numpy()
        elif self.output == "logits":
            values = logits.cpu().numpy()
        else:
            values = logits.softmax(dim=0).cpu().numpy()
        values = values.astype(self.kind.dtype)
        values[:, ~owned(pixels.valid, tile)] = self.kind.nodata
        return np.ascontiguousarray(values)


def _cut(
    wanted: Prediction,
    record: NetworkRecord,
    rule: HaloRule,
    dtype: torch.dtype,
    device: torch.device,
) -> Cut:
    """The tiles: as asked for, or as large as memory allows."""
    if norm_context(record.layers) == "image":
        if wanted.tile_px is not None:
            raise TilenetError(
                f"statistics over the whole image need it in one tile until they travel between "
                f"tiles (norm_scope: image, tile_px: {wanted.tile_px}); leave the tile's size out, "
                "or train with network.norm_scope: tile"
            )
        return Cut(grid=(1, 1))
    if wanted.tile_px is not None:
        return Cut(size_px=wanted.tile_px)
    return Cut(size_px=_tile_px(record, rule, dtype.itemsize, device))


def _tile_px(record: NetworkRecord, rule: HaloRule, item_bytes: int, device: torch.device) -> int:
    """Largest own size whose feature maps fit."""
    budget, most = CPU_BYTES, CPU_TILE_PX
    if device.type == "cuda":
        budget, most = torch.cuda.mem_get_info(device)[0] // 4, GPU_TILE_PX
    unit = record.context().alignment_px
    # An own size below the halo would compute each pixel nine times and more.
    best = least = max(unit, -(-rule.halo_px // unit) * unit)
    for own in range(least, most + 1, unit):
        read = own + 2 * rule.halo_px
        if inference_bytes(record.layers, read, read, item_bytes) > budget:
            break
        best = own
    return best


def _announce(tiling: Tiling, record: NetworkRecord, wanted: Prediction) -> None:
    rows, cols = tiling.grid
    rule = tiling.rule
    say(
        f"{rows} × {cols} tiles, own at most {max(s.own for s in tiling.rows)} × "
        f"{max(s.own for s in tiling.cols)} px, halo {rule.halo_px} px, work ratio "
        f"{tiling.work_ratio:.2f}"
    )
    if not rule.exact:
        say(
            f"approximate: the halo ({rule.halo_px} px) is not the exact one "
            f"({record.context().halo_px} px), so the map depends on the tiles"
        )
    tile_norms = [n for n in record.layers if isinstance(n, Norm) and n.scope == "tile"]
    norms = {layer.norm for layer in tile_norms}
    if norms - {"batch"}:
        say(
            f"approximate: {', '.join(sorted(norms))} norm uses the statistics of each tile, so "
            "the map depends on the tiles"
        )
