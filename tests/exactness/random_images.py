"""Images and labels of random sizes, types, layouts and grids, for random runs."""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import rasterio
from rasterio.warp import transform_geom

__all__ = ["Images", "draw_images", "write_images"]

BLOCKS: tuple[dict[str, Any], ...] = (
    {},
    {"tiled": True, "blockxsize": 16, "blockysize": 16},
    {"tiled": True, "blockxsize": 32, "blockysize": 48, "compress": "deflate"},
    {"interleave": "pixel", "compress": "deflate"},
    {"blockysize": 7},
)
IGNORE, NO_NUMBER = 255, -9999.0
CRS = "EPSG:32630"


@dataclass(frozen=True)
class Images:
    """Images of a run, and what their labels are.

    Attributes:
        seed: Of pixels and labels.
        sizes: Heights and widths.
        bands: Of each image, without the stacked file.
        dtype: Of the pixels.
        classes: Of the labels; 0: they are numbers.
        labels: `raster`, `finer`, `other` (grid) or `polygons`.
        stacked: A further file with a band: `same` grid, `other` or `turned`; empty: none.
    """

    seed: int
    sizes: tuple[tuple[int, int], ...]
    bands: int
    dtype: str
    classes: int
    labels: str
    stacked: str

    def paths(self, folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Images and their labels, as a run names them."""
        ending = "geojson" if self.labels == "polygons" else "tif"
        numbers = range(len(self.sizes))
        more = [f"+{folder / f'more{n}.tif'}" if self.stacked else "" for n in numbers]
        images = tuple(f"{folder / f'image{n}.tif'}{more[n]}" for n in numbers)
        return images, tuple(str(folder / f"labels{n}.{ending}") for n in numbers)


def draw_images(random: Random, classes: int, *, bands: int | None, crops: bool) -> Images:
    """Draw them; with crops they are larger, and with `bands` as many and no further file."""
    low = 74 if crops else 34
    sizes = [(random.randrange(low, 160), random.randrange(low, 180)) for _ in range(3)]
    count = random.choice([1, 1, 2, 3])
    return Images(
        random.randrange(1 << 30),
        tuple([sizes[0]] * count if random.random() < 0.4 else sizes[:count]),
        random.choice([1, 2, 3, 4]) if bands is None else bands,
        random.choice(["uint8", "uint16", "int16", "float32"]),
        classes,
        random.choice(["raster", "raster", "polygons", "finer", "other"]) if classes else "raster",
        random.choice(["", "", "same", "other", "turned"]) if bands is None else "",
    )


def write_images(images: Images, folder: Path) -> None:
    """Write all files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(images.sizes):
        rng = np.random.default_rng((images.seed, number))
        place = rasterio.Affine(2, 0, 5e5 + 1000 * number, 0, -2, 4e6)
        grid = {"height": size[0], "width": size[1], "crs": CRS, "transform": place}
        _write_pixels(images, folder / f"image{number}.tif", grid, rng)
        if images.stacked:
            _write_further(images.stacked, folder / f"more{number}.tif", grid, rng)
        path = Path(images.paths(folder)[1][number])
        if images.labels == "polygons":
            _write_polygons(images, path, grid, rng)
        else:
            _write_labels(images, path, grid, rng)


def _write_pixels(
    images: Images, path: Path, grid: dict[str, Any], rng: np.random.Generator
) -> None:
    height, width = grid["height"], grid["width"]
    shape = images.bands, height, width
    pixels = rng.integers(1, 200, shape).astype(images.dtype)
    if images.dtype == "float32":
        pixels = rng.normal(50, 20, shape).astype("float32")
        pixels[0, height // 2, width // 3] = rng.choice([np.nan, 1.0])
    match rng.choice(["none", "hole", "edge", "collar"]):
        case "hole":
            pixels[:, height // 5 : height // 3, width // 4 : width // 2] = 0
        case "edge":
            pixels[:, :, : width // 6] = 0
        case "collar":
            pixels[:, : height // 8] = 0
            pixels[0, :3] = 7
    nodata, layout = rng.choice([0, None], p=[0.7, 0.3]), rng.choice(np.array(BLOCKS, object))
    with rasterio.open(
        path, "w", "GTiff", count=images.bands, dtype=images.dtype, nodata=nodata, **grid, **layout
    ) as file:
        file.write(pixels)


def _write_further(kind: str, path: Path, grid: dict[str, Any], rng: np.random.Generator) -> None:
    if kind != "same":
        corner = grid["transform"]
        shear = 0.2 if kind == "turned" else 0.0
        place = rasterio.Affine(4.3, shear, corner.c - 7, 0, -4.1, corner.f + 6)
        sizes = {"height": grid["height"] // 2 + 8, "width": grid["width"] // 2 + 9}
        grid = {**grid, **sizes, "transform": place}
    values = rng.normal(9, 3, (1, grid["height"], grid["width"])).astype("float32")
    with rasterio.open(
        path, "w", "GTiff", count=1, dtype="float32", nodata=NO_NUMBER, **grid
    ) as file:
        file.write(values)


def _write_labels(
    images: Images, path: Path, grid: dict[str, Any], rng: np.random.Generator
) -> None:
    height, width, corner = grid["height"], grid["width"], grid["transform"]
    if images.labels == "finer":
        height, width, place = 2 * height, 2 * width, corner * rasterio.Affine.scale(0.5)
        grid = {**grid, "height": height, "width": width, "transform": place}
    if images.labels == "other":
        height, width = height + 9, width + 7
        place = rasterio.Affine(1.7, 0.1, corner.c + 3.3, 0.1, -2.1, corner.f - 5.1)
        grid = {**grid, "height": height, "width": width, "transform": place}
    if images.classes:
        rare = [*[1.0] * (images.classes - 1), rng.choice([0.1, 1.0])]
        labels = rng.choice(images.classes, (height, width), p=np.array(rare) / sum(rare))
        nothing, dtype = IGNORE, "uint8"
    else:
        labels, nothing, dtype = rng.normal(3, 2, (height, width)), NO_NUMBER, "float32"
    labels[-height // 4 :, : width // 3] = nothing
    with rasterio.open(path, "w", "GTiff", count=1, dtype=dtype, nodata=nothing, **grid) as file:
        file.write(labels.astype(dtype), 1)


def _write_polygons(
    images: Images, path: Path, grid: dict[str, Any], rng: np.random.Generator
) -> None:
    """Polygons in degrees, some of which cross themselves or the image's edge."""
    size = np.array([grid["width"], grid["height"]])
    features = []
    for _ in range(rng.integers(3, 14)):
        corners = rng.uniform(0, 1, 2) * size
        corners = corners + rng.normal(0, 0.25 * size.min(), (rng.integers(3, 7), 2))
        ring = [grid["transform"] * (float(x), float(y)) for x, y in corners]
        shape = {"type": "Polygon", "coordinates": [[*ring, ring[0]]]}
        features.append(
            {
                "type": "Feature",
                "properties": {"class": int(rng.integers(images.classes))},
                "geometry": transform_geom(CRS, "EPSG:4326", shape),
            }
        )
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
