"""Corners far from a window change no pixel in it: random polygons burned with and without them."""

import numpy as np
import pytest
import shapely
from affine import Affine
from rasterio.features import rasterize
from shapely.geometry import GeometryCollection, MultiPolygon, Polygon
from shapely.geometry.base import BaseGeometry

from tilenet.data.labels.far_corners import without_far_corners
from tilenet.geometry.windows import Window

GRIDS = {
    "north up": Affine(0.5, 0, 600000, 0, -0.5, 5300000),
    "sheared": Affine(2.0, 0.3, 1000, -0.4, -1.7, 900),
    "pixels": Affine.identity(),
    "degrees": Affine(2**-20, 0, 10, 0, -(2**-20), 50),  # GDAL takes corners next to others for one
}


def ring(rng: np.random.Generator, corners: int, reach: float, *, halves: bool) -> np.ndarray:
    """A walk in pixels that leaves the window, on any side, and comes back; it crosses itself."""
    walk = np.cumsum(rng.normal(0, reach, (corners, 2)), axis=0) + rng.uniform(-60, 110, 2)
    return (
        np.round(2 * walk) / 2 if halves else walk
    )  # corners in the middle of pixels, or on edges


def shape(rng: np.random.Generator, grid: Affine, *, halves: bool) -> BaseGeometry:
    """A polygon with holes anywhere, or several that overlap."""
    parts = []
    for _ in range(rng.integers(1, 4)):
        rings = []
        for _ in range(rng.integers(1, 4)):
            corners, reach = int(rng.integers(3, 60)), float(rng.choice([3, 15, 60]))
            x, y = grid @ tuple(ring(rng, corners, reach, halves=halves).T)
            rings.append(np.column_stack((x, y)))
        parts.append(Polygon(rings[0], rings[1:]))
    if len(parts) == 1:
        return parts[0]
    several = MultiPolygon(parts)
    return several if rng.random() < 0.5 else GeometryCollection([parts[0], several])


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("all_touched", [False, True])
def test_no_pixel_of_a_window_changes(grid: Affine, halves: bool, all_touched: bool) -> None:
    rng = np.random.default_rng([halves, all_touched])
    window = Window(7, -3, 41, 52)
    options = {
        "out_shape": (window.height, window.width),
        "transform": grid @ Affine.translation(window.col, window.row),
        "all_touched": all_touched,
    }
    burned, gone, before, after = 0, 0, 0, 0
    for _ in range(150):
        whole = shape(rng, grid, halves=halves)
        (near,) = without_far_corners(np.array([whole], object), grid, window)
        wanted = rasterize([(whole, 1)], **options)
        burned += 0 < wanted.sum() < wanted.size
        if near is None:
            gone += 1
            assert not wanted.any()
            continue
        assert np.array_equal(rasterize([(near, 1)], **options), wanted)
        before += shapely.get_num_coordinates(whole)
        after += sum(len(one) for part in near["coordinates"] for one in part)
    assert burned > 40  # the window is cut by polygons, and not full of them
    assert gone > 0
    assert after < 0.7 * before


def test_each_shape_has_its_own_place_in_the_list() -> None:
    square, window = np.array([(0, 0), (0, 9), (9, 9), (9, 0)]), Window(0, 0, 20, 20)
    shapes = np.array([Polygon(square + at) for at in (500, 2, -400, 5)], object)
    found = without_far_corners(shapes, Affine.identity(), window)
    assert [one is None for one in found] == [True, False, True, False]
    corners = np.vstack((square + 2, square[:1] + 2)).tolist()
    assert found[1] == {"type": "MultiPolygon", "coordinates": [[corners]]}


def test_a_ring_turns_as_it_did_where_gdal_goes_by_its_area() -> None:
    """Corners so close that GDAL takes them for one: the edge along a row stays burned, or not."""
    corners = np.array(
        [(-1.5, 26.5), (-2, 26.5), (33.5, 2), (54.5, -27), (62.5, -14.5), (51.5, -15.5)]
    )
    grid, window = GRIDS["degrees"], Window(11, -12, 44, 61)
    whole = Polygon(np.column_stack(grid @ tuple(corners.T)))
    (near,) = without_far_corners(np.array([whole], object), grid, window)
    place = grid @ Affine.translation(window.col, window.row)
    wanted = rasterize([(whole, 1)], (window.height, window.width), transform=place)
    assert np.array_equal(rasterize([(near, 1)], wanted.shape, transform=place), wanted)
