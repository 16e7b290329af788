"""Random polygons, and polygons burned pixel by pixel without GDAL."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import shapely
from affine import Affine
from pyproj import Transformer

from tilenet.data.labels.open import open_labels
from tilenet.data.rasters.raster import Raster


def random_polygons(
    transform: Affine, size: tuple[int, int], number: int, seed: int, crs: str | None = None
) -> list[shapely.Polygon]:
    """Stars with a hole, over an image in EPSG:32630 and its edges; in degrees if `crs` says so."""
    rng = np.random.default_rng(seed)
    shapes = []
    for _ in range(number):
        middle = rng.uniform(-0.1, 1.1, 2) * size[::-1]
        angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(4, 12)))
        reach = rng.uniform(0.2, 1, len(angles)) * rng.choice([3, 20, 90])
        ring = middle + reach[:, None] * np.column_stack([np.cos(angles), np.sin(angles)])
        hole = middle + 0.1 * (ring - middle)
        outer, inner = (np.column_stack(transform @ tuple(part.T)) for part in (ring, hole))
        shapes.append(shapely.Polygon(outer, [inner]))
    return moved(shapes, "EPSG:32630", crs) if crs else shapes


def moved(shapes: Sequence[Any], source: str, target: str) -> list[Any]:
    """Shapes in another CRS, by PROJ without GDAL."""
    move = Transformer.from_crs(source, target, always_xy=True).transform
    return list(
        shapely.transform(
            np.array(shapes, object), lambda xy: np.column_stack(move(xy[:, 0], xy[:, 1]))
        )
    )


def burned(path: str, image: Raster, *options: Any) -> np.ndarray:
    """All labels that a file gives an image."""
    with open_labels(path, image, *options) as labels:
        return labels.read(image.whole)


def burned_by_hand(
    shapes: Sequence[Any],
    labels: Sequence[int],
    transform: Affine,
    size: tuple[int, int],
    background: int = 0,
) -> np.ndarray:
    """Pixels whose middle has an odd number of edges to its right, shape after shape."""
    found = np.full(size, background, np.int64)
    middles = np.arange(size[1]) + 0.5
    for shape, label in zip(shapes, labels, strict=True):
        # GDAL burns the parts of a multi-polygon one after another.
        for part in shapely.get_parts(shape):
            rings = [part.exterior, *part.interiors]
            corners = [np.column_stack(~transform @ tuple(np.array(r.coords).T)) for r in rings]
            edges = np.concatenate([np.hstack([c[:-1], c[1:]]) for c in corners])
            low, high = edges[:, 1::2].min(), edges[:, 1::2].max()
            for row in range(max(int(low) - 1, 0), min(int(high) + 2, size[0])):
                y = row + 0.5
                x1, y1, x2, y2 = edges[(edges[:, 1] <= y) != (edges[:, 3] <= y)].T
                cuts = np.sort(x1 + (y - y1) / (y2 - y1) * (x2 - x1))
                found[row, np.searchsorted(cuts, middles) % 2 == 1] = label
    return found
