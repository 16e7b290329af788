"""Maps of small windows: read from a finished map, or computed by the run's network."""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.tiles import Tile, halo_rule
from tilenet.geometry.windows import Window, overlap
from tilenet.mapping.mapper import Mapper
from tilenet.model.choices import parameter_dtype
from tilenet.model.network import load_weights, network_to_fill
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.planning.balance import likely_balance
from tilenet.planning.maps import MapQuestion, choose_map
from tilenet.report.run_view import RunView
from tilenet.storage.checkpoints import load_tensors
from tilenet.storage.network_json import NetworkRecord

__all__ = ["ComputedMap", "FinishedMap", "SmallMap", "overlaps", "windows_of"]

MOST_PX = 512  # of a place's side
BUDGET_BYTES = 256 << 20  # of feature maps, as predict takes on a CPU
MOST_COLLAR_PX = 64 << 20  # of images that are read as a whole to find their collar
MOST_TILES = 100_000  # of an image, evenly spread, of which some become places
MOST_PAIRS = 200_000  # of windows and held-out blocks that are compared
NO_CLASS = -1


class SmallMap(Protocol):
    """Classes of an image by windows.

    Attributes:
        windows: Places that can be asked for, row by row.
    """

    windows: list[Window]

    def read(self, window: Window) -> NDArray[np.int64]:
        """Classes (H, W); -1 where there is none."""


class FinishedMap:
    """A class map that `tilenet predict` wrote; a context manager.

    Raises:
        TilenetError: It is no class map, or not of this image.
    """

    def __init__(self, path: str, image: Raster) -> None:
        self._raster = Raster(path)
        mapped = self._raster
        whole = mapped.size == image.size and mapped.transform.almost_equals(image.transform)
        classes = len(mapped.bands) == 1 and np.issubdtype(mapped.dtype, np.integer)
        if not whole or not classes:
            self.close()
            raise TilenetError(
                f"a class map on the grid of one of the run's images is needed ({path}: "
                f"{mapped.height} × {mapped.width} px, {len(mapped.bands)} of {mapped.dtype}; "
                f"{image.path}: {image.height} × {image.width} px); make it with tilenet predict"
            )
        self.windows = windows_of(image.whole)

    def read(self, window: Window) -> NDArray[np.int64]:
        pixels = self._raster.read(window)
        return np.where(pixels.valid, pixels.values[0].astype(np.int64), NO_CLASS)

    def close(self) -> None:
        """Close the file."""
        self._raster.close()


class ComputedMap:
    """What the network of a run's newest checkpoint makes of an image, on this process alone.

    Raises:
        TilenetError: It would take more than a window's worth of work; says why.
    """

    def __init__(self, view: RunView, image: Raster) -> None:
        record, folder = view.record, view.checkpoint
        if record is None or folder is None:
            raise TilenetError("there is no checkpoint whose network could be mapped with")
        if image.nodata == "collar" and image.height * image.width > MOST_COLLAR_PX:
            raise TilenetError("the whole image would have to be read to find its collar")
        rule = halo_rule("exact", record.context(), record.layers, record.epsilon_px)
        dtype = parameter_dtype(record.precision)
        plan = choose_map(
            MapQuestion(
                layers=record.layers,
                size=image.size,
                rule=rule,
                halo_asked=False,
                tile_px=None,
                num_ranks=1,
                item_bytes=dtype.itemsize,
                budget_bytes=BUDGET_BYTES,
                most_px=MOST_PX,
            )
        )
        if plan.method != "tiles":
            raise TilenetError(
                "the network's norm takes statistics over the whole image, which a small window "
                "has not; make a map with tilenet predict and show it with tilenet report --map"
            )
        self._tiles = plan.tiling.tiles
        self._mapper = Mapper("classes", record, image, plan.tiling, dtype)
        self._pipe = _pipe(view, record, (self._tiles[0].read.height, self._tiles[0].read.width))
        self._computed: tuple[Tile, NDArray[np.int64]] | None = None
        every = -(-len(self._tiles) // MOST_TILES)
        inside = [overlap(tile.own, image.whole) for tile in self._tiles[::every]]
        self.windows = [part for own in inside if own is not None for part in windows_of(own)]

    def read(self, window: Window) -> NDArray[np.int64]:
        tile = next(tile for tile in self._tiles if _holds(tile.own, window))
        if self._computed is None or self._computed[0] != tile:
            (computed,) = self._mapper.tiles(self._pipe, [tile])
            values = self._mapper.values(computed)[0].astype(np.int64)
            nodata = values == self._mapper.kind.nodata
            self._computed = tile, np.where(nodata, NO_CLASS, values)
        top, left = window.row - tile.own.row, window.col - tile.own.col
        found: NDArray[np.int64] = self._computed[1]
        return found[top : top + window.height, left : left + window.width]


def windows_of(window: Window) -> list[Window]:
    """The windows of at most 512 × 512 px that it consists of, row by row."""
    bottom, right = window.row + window.height, window.col + window.width
    return [
        Window(row, col, min(MOST_PX, bottom - row), min(MOST_PX, right - col))
        for row in range(window.row, bottom, MOST_PX)
        for col in range(window.col, right, MOST_PX)
    ]


def overlaps(windows: list[Window], blocks: list[Window]) -> list[Window]:
    """What windows have in common with blocks, row by row; slivers are left out.

    Of many windows and blocks only some blocks, spread over the image.
    """
    every = max(1, len(windows) * len(blocks) // MOST_PAIRS)
    met = [overlap(window, block) for window in windows for block in blocks[::every]]
    parts = [part for part in met if part is not None]
    most = max((part.height * part.width for part in parts), default=0)
    return [part for part in parts if part.height * part.width > most / 4]


def _pipe(view: RunView, record: NetworkRecord, read: tuple[int, int]) -> Pipe:
    """On the run's devices where they are there, else on the CPU."""
    names = [str(name) for name in view.facts.get("devices", ["cpu"])]
    there = torch.cuda.device_count() if any("cuda" in name for name in names) else 0
    devices = [torch.device(name) for name in names]
    if any(device.type == "cuda" and (device.index or 0) >= there for device in devices):
        devices = [torch.device("cpu")]
    dtype = parameter_dtype(record.precision)
    network = network_to_fill(record.layers, dtype)
    assert view.checkpoint is not None
    weights = load_tensors(view.checkpoint / "weights.safetensors")
    load_weights(network, weights, str(view.folder), record.names)
    balance = likely_balance(record.layers, read, len(devices))
    precision = record.precision
    return Pipe(network.eval(), balance, devices, precision=precision, inline=True)


def _holds(own: Window, part: Window) -> bool:
    rows = own.row <= part.row and part.row + part.height <= own.row + own.height
    return rows and own.col <= part.col and part.col + part.width <= own.col + own.width
