"""What bounds the end of a map of 100 000² on 1 000 ranks, by parts measured on this machine?

Ranks that have computed a map compress its pieces into one file (`mapping/writing/cog.py`). On 1, 2
and 4 ranks, each on one core and, as MPICH sees it, on a node of its own, with a map of classes
(uint8, 6144²) and one of four scores (float32, 3072²; quick: 2048² both), are measured: CPU seconds
per Mpx compressed, of the map and of overviews of pixels twice and four times as fine; bytes that
rank 0 receives; seconds of a round's calls of MPI; seconds per GB received, by the loopback device,
and written until the disk holds it. `finish` makes of these the seconds of any map on any ranks,
from a disk that takes from all nodes at once as fast as from one (`disk_gb_s`).
Claims hold it against 4 ranks that were measured, whose share of a core while they compress is that
which they had, since others may use the machine; say what 1 000 ranks do besides compressing; and
compare one rank that copies the map with GDAL's own driver, and reads the copy to see that it is
whole.
Seconds of messages and of the disk are by the clock: more where others use the machine.
"""

import os
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import rasterio
import rasterio.shutil

from bench.report import Claim, Found, at_least, at_most, on_ranks
from bench.scenes import GRID
from tilenet.mapping.writing.cog import BATCH_BYTES, BATCH_TILES, PAGE_BYTES, list_level_sizes
from tilenet.mapping.writing.tiff_header import BLOCK_PX, Level
from tilenet.mapping.writing.tile_shares import share_tiles

KINDS = {"classes": (1, "uint8", 6144), "scores": (4, "float32", 3072)}
SIDE, RANKS, NODE_RANKS, PIECE_PX = 100_000, (1, 10, 100, 1000), 8, 1024
MESSAGE_BYTES, MESSAGES = 4 << 20, 64
TILE_MPX = BLOCK_PX**2 / 1e6


@dataclass(frozen=True)
class Parts:
    """Seconds, measured.

    Attributes:
        mpx_s: CPU per Mpx compressed, by how often its pixels were halved for it: 0, 1, 2 times.
        mpx_bytes: Of a compressed Mpx.
        receive_s: Per GB that rank 0 receives.
        write_s: Per GB that a node writes.
        round_s: Of a round's calls of MPI on two ranks.
        share_s: That each further rank adds to them.
    """

    mpx_s: tuple[float, float, float]
    mpx_bytes: float
    receive_s: float
    write_s: float
    round_s: float
    share_s: float


@dataclass(frozen=True)
class Seconds:
    """Those of a finish, one part after another, and GB/s that the disk takes while nodes write."""

    compressing: float
    receiving: float
    writing: float
    rounds: float
    disk_gb_s: float = 0.0

    @property
    def all(self) -> float:
        """Of all parts."""
        return self.compressing + self.receiving + self.writing + self.rounds


def finish(
    parts: Parts, side: int, tile_bytes: int, ranks: int, node_ranks: int, slower: float = 1.0
) -> Seconds:
    """What a square map takes: parts add up, since nothing goes on while something else does.

    Files are filled in rounds. Every second overview, from the second on, has a file of its own, of
    which the next two are made; the last file copies it. In a round each rank compresses tiles of
    about the same work, that of up to 16 tiles of the map, or of 32 MiB of them, and the slowest
    rank counts. Then each node writes whole pages of its ranks' tiles, and rank 0 receives and
    writes, rank after rank, what is less than a page, of each rank on another node one page on
    average, as parts of a file begin anywhere in it; the node that writes most counts. Calls take
    `round_s` per doubling of ranks and `share_s` per rank. Tiles are full, of mean size; pieces are
    read as fast as they were here, from memory.

    Args:
        side: Rows and columns of the map.
        tile_bytes: Of a tile's pixels.
        node_ranks: Ranks of a node.
        slower: Seconds in which a rank gets a CPU second.
    """
    sizes = list_level_sizes(side, side)
    aside = range(2, len(sizes) - 1, 2)
    tiles = [len(Level(*size).tiles) for size in sizes]
    costs = [parts.mpx_s[n - max(0, (n - 1) // 2 * 2)] * TILE_MPX for n in range(len(sizes))]
    files = [[(costs[n], tiles[n])] for n in aside]
    files += [[(0 if n in aside else costs[n], tiles[n]) for n in range(len(sizes))[::-1]]]
    most = max(1, min(BATCH_TILES, BATCH_BYTES // tile_bytes))
    slowest = received_gb = node_gb = rounds = 0.0
    tile_gb = TILE_MPX * parts.mpx_bytes / 1e9
    for file in files:
        order = np.repeat([cost for cost, _ in file], [count for _, count in file])
        until, work = np.cumsum([0, *order]), np.maximum(1, order / costs[0])
        for firsts in np.array(share_tiles(work.tolist(), ranks, most)):
            slowest += float(np.diff(until[firsts]).max())
            shares_gb = np.diff(firsts) * tile_gb
            handed_gb = np.minimum(shares_gb, PAGE_BYTES / 1e9)
            handed_gb[:node_ranks] = 0
            nodes_gb = np.add.reduceat(shares_gb - handed_gb, range(0, ranks, node_ranks))
            nodes_gb[0] += handed_gb.sum()
            received_gb += float(handed_gb.sum())
            node_gb += float(nodes_gb.max())
            rounds += 1
    written_gb = sum(count for file in files for _, count in file) * tile_gb
    writing = node_gb * parts.write_s
    calls = parts.round_s * (ranks - 1).bit_length() + parts.share_s * max(0, ranks - 2)
    return Seconds(
        slowest * slower, received_gb * parts.receive_s, writing, rounds * calls,
        written_gb / writing,
    )  # fmt: skip


def pin(rank: int) -> None:
    """Have a rank compute on one core: GDAL compresses with as many threads as it has cores."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def moved(folder: str) -> dict[str, float]:
    """On this job's ranks: the parts that do not depend on the map."""
    from mpi4py import MPI

    comm, data = MPI.COMM_WORLD, bytes(MESSAGE_BYTES)
    pin(comm.rank)

    def calls(ranks: int) -> float:
        """A round's, with messages of so many ranks."""
        for said in (0, 0, [1 << 20] * BATCH_TILES, 0):
            theirs = comm.allgather([MPI.pickle.dumps(said)] * (ranks // comm.size))
            _ = [MPI.pickle.loads(one) for those in theirs for one in those]
        return time.perf_counter()

    def timed(ranks: int) -> float:
        return median(-time.perf_counter() + calls(ranks) for _ in range(50))

    few, many = timed(comm.size), timed(1000)
    begun = time.perf_counter()
    for _ in range(MESSAGES):
        if comm.rank == 1:
            comm.Send(data, 0)
        elif comm.rank == 0:
            comm.Recv(bytearray(MESSAGE_BYTES), 1)
    then = time.perf_counter()
    if comm.rank == 0:
        with open(Path(folder, "written"), "wb", buffering=0) as file:
            for _ in range(MESSAGES):
                file.write(data)
            os.fsync(file.fileno())
    gb = MESSAGES * MESSAGE_BYTES / 1e9
    return {
        "receive_s": (then - begun) / gb, "write_s": (time.perf_counter() - then) / gb,
        "round_s": few, "share_s": (many - few) / (1000 - comm.size),
    }  # fmt: skip


def write_scene(folder: Path, kind: str, side: int) -> None:
    """Pixels as smooth as a network's, with a little noise, and a raster of their size."""
    import torch

    torch.manual_seed(side)
    coarse = torch.randn(1, 4, side // 32, side // 32)
    fields = 4 * torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic")[0]
    fields += 0.1 * torch.randn(fields.shape)
    pixels = fields.argmax(0, True).byte() if kind == "classes" else fields.softmax(0)
    np.save(folder / f"{kind}.npy", pixels.numpy())
    like = GRID | {"count": 1, "height": side, "width": side, "dtype": "uint8"}
    rasterio.open(folder / f"{kind}.tif", "w", sparse_ok=True, **like).close()


def finished(folder: str, kind: str, side: int) -> Any:
    """On this job's ranks: what a map's finish took, after that of a small one."""
    from mpi4py import MPI

    from tilenet.data.rasters.raster import Raster
    from tilenet.geometry.windows import Window
    from tilenet.mapping.writing import cog
    from tilenet.mapping.writing.map_kind import MapKind
    from tilenet.mapping.writing.writer import MapWriter

    bands, dtype, _ = KINDS[kind]
    pin(MPI.COMM_WORLD.rank)
    compressed, sums = cog._CogWriter._make_tiles, defaultdict[str, float](float)

    class Counted(MPI.Intracomm):
        """Counts bytes that are received."""

        def Recv(self, buf: Any, *where: Any, **more: Any) -> None:
            super().Recv(buf, *where, **more)
            sums["received"] += len(buf)

    def timed(self: Any, number: int, tiles: list[int]) -> list[memoryview]:
        halved = number - max(level for level in self.sources if level <= number)
        begun, cpu_begun = time.perf_counter(), time.process_time()
        found = compressed(self, number, tiles)
        if number not in self.files:
            sums[f"cpu {halved}"] += time.process_time() - cpu_begun
            sums["wall"] += time.perf_counter() - begun
            sums[f"mpx {halved}"] += len(tiles) * TILE_MPX
        return found

    cog._CogWriter._make_tiles = timed  # type: ignore[method-assign]
    comm, pixels = Counted(MPI.COMM_WORLD), np.load(Path(folder, f"{kind}.npy"), "r")
    made, out = MapKind(bands, dtype, 255, tuple("abcd")), Path(folder, "map.tif")
    for part in (PIECE_PX, side):
        with (
            Raster(str(Path(folder, f"{kind}.tif"))) as like,
            MapWriter(str(out), like, made, Window(0, 0, part, part), comm=comm) as writer,
        ):
            for number, place in enumerate(np.ndindex(part // PIECE_PX, part // PIECE_PX)):
                if number % comm.size == comm.rank:
                    row, col = (PIECE_PX * n for n in place)
                    values = pixels[:, row : row + PIECE_PX, col : col + PIECE_PX]
                    writer.write(Window(row, col, PIECE_PX, PIECE_PX), values)
            sums.clear()
            comm.Barrier()
            begun, cpu_begun = time.perf_counter(), time.process_time()
            writer.finish()
    seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
    every = defaultdict[str, float](float)
    for rank in comm.allgather({**sums}):
        for name, value in rank.items():
            every[name] += value
    cpu, mpx = ([every[f"{what} {halved}"] for halved in range(3)] for what in ("cpu", "mpx"))
    return {
        "seconds": seconds, "busiest_cpu_s": comm.allreduce(cpu_s, MPI.MAX),
        "received": every["received"], "slower": every["wall"] / sum(cpu),
        "mpx_s": [one / many for one, many in zip(cpu, mpx, strict=True)],
        "mpx_bytes": out.stat().st_size / sum(mpx),
    }  # fmt: skip


def with_gdals_driver(folder: str, kind: str, side: int) -> float:
    """CPU seconds of one rank that copies the map with GDAL's driver, and reads all of the copy."""
    pin(0)
    bands, dtype, _ = KINDS[kind]
    plain, copy = str(Path(folder, "plain.tif")), str(Path(folder, "copy.tif"))
    profile = GRID | {"count": bands, "height": side, "width": side, "dtype": dtype, "nodata": 255}
    with rasterio.open(plain, "w", tiled=True, blockxsize=512, blockysize=512, **profile) as file:
        file.write(np.load(Path(folder, f"{kind}.npy"), "r"))
    options = {
        "compress": "DEFLATE", "blocksize": 512,
        "level": 6 if kind == "classes" else 1,
        "predictor": "NO" if kind == "classes" else "YES",
        "overview_resampling": "MODE" if kind == "classes" else "AVERAGE",
    }  # fmt: skip
    begun = time.process_time()
    rasterio.shutil.copy(plain, copy, driver="COG", **options)
    with rasterio.open(copy) as file:
        levels: list[dict[str, int]] = [
            {"overview_level": n} for n in range(len(file.overviews(1)))
        ]
    for level in [{}, *levels]:
        with rasterio.open(copy, **level) as file:
            for _, window in file.block_windows(1):
                file.read(window=window)
    return time.process_time() - begun


def bench(quick: bool, turns: int = 1) -> Found:
    """Measure, and predict what was measured and what cannot be."""
    os.environ["MPIR_CVAR_NUM_CLIQUES"] = "4"  # nodes, as MPICH is to see them
    figures, claims = dict[str, Any](), list[Claim]()
    rows = [["map", "ranks", "seconds", *Seconds.__annotations__]]
    with tempfile.TemporaryDirectory() as folder:
        for kind, (bands, dtype, side) in KINDS.items():
            side = 2048 if quick else side
            write_scene(Path(folder), kind, side)
            moves = {number: on_ranks(number, moved, folder) for number in (2, 4)}
            runs: dict[int, list[Any]] = {1: [], 2: [], 4: []}
            gdals = []
            for _ in range(turns):
                gdals.append(on_ranks(1, with_gdals_driver, folder, kind, side))
                for number, measured in runs.items():
                    measured.append(on_ranks(number, finished, folder, kind, side))
            alone = min(runs[1], key=lambda one: sum(one["mpx_s"]))
            parts = Parts(alone["mpx_s"], alone["mpx_bytes"], **moves[2])
            fastest = min(runs[4], key=lambda one: one["seconds"])
            tile_bytes = bands * np.dtype(dtype).itemsize * BLOCK_PX**2
            four = finish(parts, side, tile_bytes, 4, 1, fastest["slower"])
            large = [finish(parts, SIDE, tile_bytes, ranks, NODE_RANKS) for ranks in RANKS]
            for ranks, one in zip(RANKS, large, strict=True):
                values = one.all, *astuple(one)
                rows.append([kind, f"{ranks}", *(f"{value:.3g}" for value in values)])
            figures[kind] = {
                "side": side, "moved": moves, "measured": runs, "parts": asdict(parts),
                "CPU seconds with GDAL's driver": gdals,
                "predicted on 4 ranks": asdict(four), f"{SIDE}²": [asdict(one) for one in large],
            }  # fmt: skip
            ratio = four.all / fastest["seconds"]
            claim = f"{kind} on 4 ranks: seconds predicted and measured, the more over the less"
            claims.append(at_most(claim, max(ratio, 1 / ratio), 1.25))
            claim = f"{kind}, {SIDE}² on {RANKS[-1]} ranks: seconds of all else over compressing"
            claims.append(at_most(claim, large[-1].all / large[-1].compressing - 1, 1))
            if kind == "scores":
                busiest = median(one["busiest_cpu_s"] for one in runs[4])
                claim = (
                    f"{kind}: CPU seconds of a rank that copies with GDAL's driver and reads the "
                    "copy, over the busiest of 4"
                )
                claims.append(at_least(claim, median(gdals) / busiest, 5))
    title = f"The end of a map of {SIDE}², {NODE_RANKS} ranks a node, predicted from parts"
    return figures | {"tables": {title: rows}}, claims
