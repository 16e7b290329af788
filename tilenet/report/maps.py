"""Maps of small windows: read from a finished map, or computed by the run's network."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.halo_rule import halo_rule
from tilenet.geometry.tiles import Tile
from tilenet.geometry.windows import Window, overlap
from tilenet.mapping.mapper import Mapper
from tilenet.model.dtypes import parameter_dtype
from tilenet.model.network import load_weights, network_to_fill
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.ranks.tf32 import tf32_if_asked
from tilenet.planning.balance import likely_balance
from tilenet.planning.maps.choose import choose_map
from tilenet.planning.maps.question import MapQuestion
from tilenet.report.run_view import RunView
from tilenet.storage.checkpoints import load_tensors

MOST_PX = 512  # of a place's side
BUDGET_BYTES = 256 << 20  # of feature maps, as predict takes on a CPU
MOST_COLLAR_PX = 64 << 20  # of images that are read as a whole to find their collar
MOST_LOOKS = 48  # windows of labels that are read
MOST_MAP_LOOKS = 400  # of a finished map, which costs no computing
NO_CLASS = -1

Item = TypeVar("Item")


@dataclass(frozen=True)
class SmallMaps:
    """Classes of an image by windows.

    Attributes:
        windows: Windows that a place may be, spread over the image.
        read: Classes (H, W) of one of them; -1 at pixels without a class.
        computed: Whether reading one costs computing.
    """

    windows: list[Window]
    read: Callable[[Window], NDArray[np.int64]]
    computed: bool


def finished_maps(mapped: Raster, image: Raster) -> SmallMaps:
    """Windows of a class map that `tilenet predict` wrote of an image.

    Raises:
        TilenetError: It is no class map, or not of this image.
    """
    whole = mapped.size == image.size and mapped.crs == image.crs
    whole &= mapped.transform.almost_equals(image.transform)
    if not whole or len(mapped.bands) != 1 or not np.issubdtype(mapped.dtype, np.integer):
        raise TilenetError(
            f"a class map on the grid of one of the run's images is needed ({mapped.path}: "
            f"{mapped.height} × {mapped.width} px, {len(mapped.bands)} of {mapped.dtype}; "
            f"{image.path}: {image.height} × {image.width} px); make it with tilenet predict"
        )

    def read(window: Window) -> NDArray[np.int64]:
        pixels = mapped.read(window)
        return np.where(pixels.valid, pixels.values[0].astype(np.int64), NO_CLASS)

    return SmallMaps(_spread(_windows_of(image.whole), MOST_MAP_LOOKS), read, computed=False)


def computed_maps(view: RunView, image: Raster, blocks: Sequence[Window]) -> SmallMaps:
    """Map windows of an image with a run's newest checkpoint, on this process alone.

    Args:
        blocks: Windows that places are taken from; empty: the whole image.

    Raises:
        TilenetError: It would take more than a window's worth of work; says why.
    """
    record = view.record
    if record is None or view.checkpoint is None:
        raise TilenetError("there is no checkpoint whose network could be mapped with")
    if image.nodata == "collar" and image.height * image.width > MOST_COLLAR_PX:
        raise TilenetError("the whole image would have to be read to find its collar")
    dtype = parameter_dtype(record.precision)
    question = MapQuestion(
        layers=record.layers,
        size=image.size,
        rule=halo_rule("exact", record.layers, record.epsilon_px),
        halo_asked=False,
        tile_px=None,
        num_ranks=1,
        item_bytes=dtype.itemsize,
        budget_bytes=BUDGET_BYTES,
        most_px=MOST_PX,
    )
    plan = choose_map(question)
    if plan.method != "tiles":
        raise TilenetError(
            "the network's norm takes statistics over the whole image, which a small window "
            "has not; make a map with tilenet predict and show it with tilenet report --map"
        )
    tiles = plan.tiling.tiles
    mapper = Mapper("classes", record, image, plan.tiling, dtype)
    pipe = _pipe(view, (tiles[0].read.height, tiles[0].read.width))

    @lru_cache(maxsize=1)
    def tile_map(tile: Tile) -> NDArray[np.int64]:
        with tf32_if_asked(record.precision):
            (computed,) = mapper.tiles(pipe, [tile], iter([mapper.input(tile.read)]))
        classes = mapper.values(computed)[0].astype(np.int64)
        return np.where(classes == mapper.kind.nodata, NO_CLASS, classes)

    def read(window: Window) -> NDArray[np.int64]:
        tile = next(tile for tile in tiles if _holds_middle(tile.own, window))
        top, left = window.row - tile.own.row, window.col - tile.own.col
        return tile_map(tile)[top : top + window.height, left : left + window.width]

    if blocks:  # the part of each that lies in the tile of its middle
        candidates = [(b, t.own) for b in _spread(blocks, MOST_LOOKS) for t in tiles]
        pairs = [(block, own) for block, own in candidates if _holds_middle(own, block)]
    else:
        pairs = [(image.whole, tile.own) for tile in _spread(tiles, MOST_LOOKS)]
    parts = [part for pair in pairs if (part := overlap(*pair)) is not None]
    windows = [window for part in parts for window in _windows_of(part)]
    return SmallMaps(_spread(windows, MOST_LOOKS), read, computed=True)


def _pipe(view: RunView, read: tuple[int, int]) -> Pipe:
    """A pipe on the run's devices where they are there, else on the CPU."""
    record = view.record
    assert record is not None
    assert view.checkpoint is not None
    devices = [torch.device(str(name)) for name in view.facts.get("devices", ["cpu"])]
    counts = [torch.get_device_module(device).device_count() for device in devices]
    if any((d.index or 0) >= count for d, count in zip(devices, counts, strict=True)):
        devices = [torch.device("cpu")]
    network = network_to_fill(record.layers, parameter_dtype(record.precision))
    weights = load_tensors(view.checkpoint / "weights.safetensors")
    load_weights(network, weights, str(view.folder), record.names)
    balance = likely_balance(record.layers, read, len(devices))
    return Pipe(network.eval(), balance, devices, precision=record.precision, inline=True)


def _windows_of(window: Window) -> list[Window]:
    """The windows of at most 512 × 512 px that it consists of, row by row."""
    bottom, right = window.row + window.height, window.col + window.width
    return [
        Window(row, col, min(MOST_PX, bottom - row), min(MOST_PX, right - col))
        for row in range(window.row, bottom, MOST_PX)
        for col in range(window.col, right, MOST_PX)
    ]


def _spread(items: Sequence[Item], most: int) -> list[Item]:
    places = np.linspace(0, len(items) - 1, min(most, len(items)))
    return [items[int(place)] for place in places]


def _holds_middle(own: Window, part: Window) -> bool:
    row, col = part.row + part.height // 2, part.col + part.width // 2
    rows = own.row <= row < own.row + own.height
    return rows and own.col <= col < own.col + own.width
