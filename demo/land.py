"""What lies where: forest, fields, villages, works, waters and roads, as classes and objects.

Nothing here knows a colour; see spectra.py. All of it depends on the seed and the pixels'
coordinates only.
"""

from dataclasses import dataclass

import numpy as np
from blocks import Blocks, find_blocks
from noise import Floats, Hashes, byte, fractal_noise, hashed, smooth_noise
from numpy.typing import NDArray
from waters import lakes, rivers

from tilenet.geometry.windows import Window

__all__ = ["BUILDING", "CLASSES", "FIELD", "FOREST", "GARDEN", "ROAD", "WATER", "Land", "make_land"]

CLASSES = ("field", "road", "forest", "building", "water")
FIELD, ROAD, FOREST, BUILDING, WATER = range(5)
GARDEN = 5  # looks greener than fields do, and is labelled as one

BLOCK_PX = 300
STREET_PX = 6
LOT_PX = 26


@dataclass
class Land:
    """A window of land.

    Attributes:
        kind: Class of each pixel, or `GARDEN`, (H, W).
        bits: Random bits of the object that each pixel belongs to: a parcel, a roof, a lake.
        across: Position across the rows of a crop, in pixels.
        side: -1 and 1 on the two sides of a roof.
        height: Length of the shadow in pixels.
    """

    kind: NDArray[np.uint8]
    bits: Hashes
    across: Floats
    side: Floats
    height: Floats

    @property
    def classes(self) -> NDArray[np.uint8]:
        """Class of each pixel."""
        return np.where(self.kind == GARDEN, np.uint8(FIELD), self.kind)

    def put(self, where: NDArray[np.bool_], kind: int, bits: Hashes, height: float = 0) -> None:
        """Lay objects of a class over what is there."""
        self.kind[where] = kind
        self.bits[where] = np.broadcast_to(bits, where.shape)[where]
        self.height[where] = height


def make_land(seed: int, window: Window) -> Land:
    """The land of a window."""
    shape = window.height, window.width
    rows = np.arange(window.row, window.row + window.height, dtype=np.float32)[:, None]
    cols = np.arange(window.col, window.col + window.width, dtype=np.float32)[None, :]
    # Bent coordinates: neither roads nor fields are quite straight.
    rows = rows + 60 * (fractal_noise(seed + 10, window, 240, 2) - np.float32(0.5))
    cols = cols + 60 * (fractal_noise(seed + 20, window, 240, 2) - np.float32(0.5))
    blocks = find_blocks(seed + 30, window, rows, cols, BLOCK_PX)

    angle = (byte(blocks.bits, 2) * np.float32(np.pi))[blocks.number]
    cos, sin = np.cos(angle), np.sin(angle)
    along, across = cos * cols + sin * rows, cos * rows - sin * cols
    block = blocks.bits[blocks.number]
    draw = byte(block, 3)
    inside = blocks.edge_px > 9

    land = Land(
        kind=np.full(shape, FIELD, np.uint8),
        bits=np.zeros(shape, np.uint64),
        across=across,
        side=np.zeros(shape, np.float32),
        height=np.zeros(shape, np.float32),
    )
    _farmland(land, seed + 40, along, across, block, inside)
    wooded = fractal_noise(seed + 50, window, 320, 4)
    land.put((wooded > 0.6) | (draw < 0.06), FOREST, hashed(seed + 60, block), 4)
    _village(land, seed + 70, along, across, block, inside, (draw > 0.78) & (wooded < 0.63))
    _works(land, seed + 80, along, across, block, inside, (draw > 0.74) & (draw < 0.78))
    river, bank, river_bits = rivers(seed + 90, rows, cols, window)
    trees = bank & (smooth_noise(seed + 100, window, 40) > 0.5)
    land.put(trees & (land.kind != BUILDING), FOREST, hashed(seed + 110, block), 4)
    land.put(river, WATER, river_bits)
    _roads(land, blocks)
    lake, lake_bits = lakes(seed + 120, window)
    land.put(lake, WATER, lake_bits)
    return land


def _farmland(
    land: Land,
    seed: int,
    along: Floats,
    across: Floats,
    block: Hashes,
    inside: NDArray[np.bool_],
) -> None:
    """Parcels along a block's direction; tracks and hedges between some, farms on a few."""
    wide = 36 + 60 * byte(block, 4)
    long = 110 + 180 * byte(block, 5)
    strip = np.floor(across / wide)
    shifted = along / long + byte(hashed(seed, block, strip.astype(np.int64)), 0)
    piece = np.floor(shifted)
    land.bits[:] = hashed(seed + 1, block, strip.astype(np.int64), piece.astype(np.int64))
    edge = np.round(across / wide)
    border = hashed(seed + 2, block, edge.astype(np.int64))
    off = np.abs(across - edge * wide)
    land.put((off < 3) & (byte(border, 0) < 0.12), FOREST, border, 3)
    land.put((off < 1.9) & (byte(border, 0) > 0.72), ROAD, border)
    # A farm: one long roof near the corner of its parcel.
    down, right = across - strip * wide, (shifted - piece) * long
    farm = (np.abs(down - 18) < 5 + 3 * byte(land.bits, 6)) & (np.abs(right - 26) < 13)
    farm &= inside & (byte(land.bits, 7) < 0.1) & (land.kind == FIELD)
    land.side[farm] = np.where(down > 18, 1, -1)[farm]
    land.put(farm, BUILDING, hashed(seed + 3, land.bits), 4)


def _village(
    land: Land,
    seed: int,
    along: Floats,
    across: Floats,
    block: Hashes,
    inside: NDArray[np.bool_],
    where: NDArray[np.bool_],
) -> None:
    """Streets with a lot on either side, and a house on most lots."""
    street, in_street = _repeat(across, 2 * LOT_PX + STREET_PX)
    cross, in_cross = _repeat(along, 7 * LOT_PX + STREET_PX)
    row, down = _repeat(in_street - STREET_PX, LOT_PX)
    lot, right = _repeat(in_cross - STREET_PX, LOT_PX)
    bits = hashed(seed, block, street * 2 + row, cross * 7 + lot)
    land.put(where, GARDEN, bits)
    paved = where & ((in_street < STREET_PX) | (in_cross < STREET_PX))
    land.put(paved, ROAD, hashed(seed + 1, block))
    half_down, half_right = 4.5 + 3.5 * byte(bits, 0), 5 + 4.5 * byte(bits, 1)
    off_down = down - (11 + 4 * byte(bits, 2))
    off_right = right - (11 + 4 * byte(bits, 3))
    house = (np.abs(off_down) < half_down) & (np.abs(off_right) < half_right)
    house &= where & ~paved & inside & (byte(bits, 4) < 0.85)
    land.side[house] = np.where(byte(bits, 5) < 0.5, np.sign(off_down), np.sign(off_right))[house]
    land.put(house, BUILDING, hashed(seed + 2, bits), 4)


def _works(
    land: Land,
    seed: int,
    along: Floats,
    across: Floats,
    block: Hashes,
    inside: NDArray[np.bool_],
    where: NDArray[np.bool_],
) -> None:
    """Halls with flat roofs on paved yards between strips of grass."""
    col, right = _repeat(along, 96)
    row, down = _repeat(across, 74)
    bits = hashed(seed, block, row, col)
    land.put(where, FIELD, hashed(seed + 1, bits))
    yard = where & inside & (np.abs(down - 37) < 32) & (np.abs(right - 48) < 43)
    land.put(yard, ROAD, hashed(seed + 2, bits))
    hall = yard & (np.abs(down - 37) < 14 + 14 * byte(bits, 0))
    hall &= np.abs(right - 48) < 18 + 20 * byte(bits, 1)
    land.put(hall, BUILDING, hashed(seed + 3, bits), 5)


def _roads(land: Land, blocks: Blocks) -> None:
    """Roads on most borders between blocks; where they meet a river they are bridges."""
    half = np.where(byte(blocks.border, 0) < 0.4, 4.2, 2.6)
    road = (blocks.edge_px < half) & (byte(blocks.border, 1) < 0.8)
    land.put(road, ROAD, blocks.border)


def _repeat(values: Floats, period: float) -> tuple[NDArray[np.int64], Floats]:
    """Which repetition each value lies in, and where in it."""
    number = np.floor(values / np.float32(period))
    return number.astype(np.int64), values - number * np.float32(period)
