"""Maps that tests write: what they hold, and how."""

from collections.abc import Callable

import numpy as np

from tilenet.data.rasters.raster import Raster
from tilenet.geometry.windows import Window
from tilenet.mapping.writing.map_kind import MapKind
from tilenet.mapping.writing.writer import MapWriter

Write = Callable[..., str]
CLASSES = MapKind(1, "uint8", 255, ("water", "forest", "town"))
MANY_CLASSES = MapKind(1, "uint16", 65535, ("water", "forest", "town"))
SCALED = MapKind(2, "uint8", 255, ("water", "forest"), 1 / 250)
SCORES = MapKind(2, "float32", float("nan"), ("water", "forest"))


def like(write_raster: Write, size: tuple[int, int]) -> Raster:
    values = np.random.default_rng(1).integers(0, 9, size).astype("uint8")
    return Raster(write_raster("like.tif", values))


def values_of(kind: MapKind, size: tuple[int, int], seed: int = 2) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind.dtype[0] == "u":
        values = rng.integers(0, len(kind.classes), (kind.bands, *size)).astype(kind.dtype)
    else:
        values = rng.normal(size=(kind.bands, *size)).astype(kind.dtype)
    values[:, rng.random(size) < 0.1] = kind.nodata
    return values


def written(kind: MapKind) -> list[str]:
    """The files of a map: GDAL keeps names of values in a file next to it, QGIS a style."""
    return ["map.qml"] * (kind.bands == 1) + ["map.tif"] + ["map.tif.aux.xml"] * (kind.bands == 1)


def write_map(source: Raster, path: str, kind: MapKind, values: np.ndarray | None = None) -> None:
    """A map of a whole image at once, of these values or of any."""
    with MapWriter(path, source, kind) as writer:
        writer.write(source.whole, values_of(kind, source.size) if values is None else values)
        writer.finish()


def write_in_tiles(writer: MapWriter, values: np.ndarray, side: int) -> None:
    """As prediction does: own windows of tiles, the last ones beyond the raster's edge."""
    height, width = values.shape[1:]
    padded = np.pad(values, ((0, 0), (0, side), (0, side)), constant_values=1)
    for row in range(0, height + side - 1, side):
        for col in range(0, width + side - 1, side):
            window = Window(row, col, side, side)
            writer.write(window, padded[:, row : row + side, col : col + side])
