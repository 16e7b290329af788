"""The small images and labels that the guide's pages speak of, made in a folder."""

from pathlib import Path

import numpy as np
import pyogrio
import rasterio
import shapely
from affine import Affine
from numpy.typing import NDArray
from rasterio.warp import transform_bounds

__all__ = ["class_map", "scene", "towns"]

BANDS = ("blue", "green", "red", "nir")
NORTH = Affine(2, 0, 600_000, 0, -2, 5_400_000)
SOUTH = Affine(2, 0, 620_000, 0, -2, 5_390_000)
EAST = Affine(2, 0, 640_000, 0, -2, 5_400_000)
UTM = "EPSG:32632"
LIST = """image,label,split
north.tif,north.gpkg,train
south.tif,south.geojson,train
east.tif,east_labels.tif,validation
"""


def towns(folder: Path) -> None:
    """Polygons for north, in degrees for south, labels of another CRS for east; and their list."""
    pixels = _pixels(1, 96, 128)
    _raster(folder / "north.tif", pixels, NORTH, BANDS)
    _polygons(folder / "north.gpkg", UTM, forest=(60, 40, 220, 140), lake=(0, 120, 80, 192))
    pixels = _pixels(2, 100, 90)
    _raster(folder / "south.tif", pixels[::-1], SOUTH, BANDS[::-1])
    for band, name in zip(pixels, ("B02", "B03", "B04", "B08"), strict=True):
        _raster(folder / f"T32_{name}.tif", band[None], SOUTH, ())
    _polygons(folder / "south.geojson", "EPSG:4326", forest=(20, 30, 120, 150))
    _raster(folder / "east.tif", _pixels(5, 80, 100), EAST, BANDS)
    left, _, _, top = transform_bounds(
        UTM, "EPSG:32633", EAST.c, EAST.f - 160, EAST.c + 200, EAST.f
    )
    _grid(folder / "east_labels.tif", (50, 60), Affine(5, 0, left, 0, -5, top), "EPSG:32633")
    (folder / "list.csv").write_text(LIST)


def scene(folder: Path) -> None:
    """One image with labels on its grid."""
    _raster(folder / "scene.tif", _pixels(3, 157, 211), NORTH, BANDS)
    _grid(folder / "labels.tif", (157, 211), NORTH)


def class_map(folder: Path) -> None:
    """A map of three classes, in patches of 3 × 3 pixels."""
    patches = np.random.default_rng(6).choice([0, 1, 2], (9, 13), p=[0.6, 0.2, 0.2])
    _raster(folder / "map.tif", patches.repeat(3, 0).repeat(3, 1).astype(np.uint8)[None], NORTH, ())
    with rasterio.open(folder / "map.tif", "r+") as file:
        file.update_tags(1, class_0="field", class_1="road", class_2="building")


def _pixels(seed: int, height: int, width: int) -> NDArray[np.uint16]:
    random = np.random.default_rng(seed)
    return random.integers(200, 900, (len(BANDS), height, width)).astype(np.uint16)


def _grid(path: Path, size: tuple[int, int], transform: Affine, crs: str = UTM) -> None:
    labels = np.random.default_rng(4).integers(0, 3, size).astype(np.uint8)
    _raster(path, labels[None], transform, (), crs)


def _raster(
    path: Path,
    values: NDArray[np.integer],
    transform: Affine,
    names: tuple[str, ...],
    crs: str = UTM,
) -> None:
    count, height, width = values.shape
    size = {"count": count, "height": height, "width": width, "dtype": values.dtype.name}
    with rasterio.open(path, "w", driver="GTiff", crs=crs, transform=transform, **size) as file:
        file.write(values)
        for band, name in enumerate(names, start=1):
            file.set_band_description(band, name)


def _polygons(path: Path, crs: str, **boxes: tuple[int, int, int, int]) -> None:
    """A box per name: metres right of and below the image's corner, (left, top, right, bottom)."""
    corner = NORTH if crs == UTM else SOUTH
    places = [
        (corner.c + left, corner.f - bottom, corner.c + right, corner.f - top)
        for left, top, right, bottom in boxes.values()
    ]
    shapes = [shapely.box(*transform_bounds(UTM, crs, *place)) for place in places]
    pyogrio.raw.write(
        path,
        shapely.to_wkb(np.array(shapes)),
        [np.array(list(boxes), object)],
        ["kind"],
        geometry_type="Polygon",
        crs=crs,
    )
