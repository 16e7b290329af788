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


CLOSE = [(-1.5, 26.5), (-2, 26.5), (33.5, 2), (54.5, -27), (62.5, -14.5), (51.5, -15.5)]
BAY = [(2, 8.5), (2, -3), (2, -40), (18, -40), (18, -3), (18, 8.5), (11, 8.5), (11, -30)]
BAY += [(9, -30), (9, 8.5)]
FLAT = [
    (10.5, -3.5), (-8, -3.5), (18.5, -3.5), (-14.5, -3.5), (12, -9.5), (-2, -3.5), (13.5, -10),
    (14.5, -3.5), (-14.5, -1.5), (-56, -3.5), (-35.5, -12.5), (-39.5, -3.5), (-21, -3.5),
    (-47.5, -3.5), (-14.5, -3.5), (-41, -9.5), (-27, -3.5), (-42.5, -10), (-43.5, -3.5),
    (-14.5, -1.5), (-14.5, -1.5), (27, -3.5), (6.5, -12.5),
]  # fmt: skip
FINE = Affine(0.3, 0, 600000.7, 0, -0.3, 5300000.1)


@pytest.mark.parametrize(
    ("corners", "grid", "window"),
    [
        # So close that GDAL takes corners for one, and goes by the area.
        pytest.param(CLOSE, GRIDS["degrees"], Window(11, -12, 44, 61), id="close"),
        # Without its lowest corners it would turn the other way.
        pytest.param(BAY, Affine.identity(), Window(0, 0, 20, 20), id="bay"),
        pytest.param(BAY[::-1], Affine.identity(), Window(0, 0, 20, 20), id="bay, the other way"),
        # Of an area of which only rounding is left.
        pytest.param(FLAT, FINE, Window(-12, -22, 24, 24), id="flat"),
    ],
)
def test_rings_turn_as_they_did(
    corners: list[tuple[float, float]], grid: Affine, window: Window
) -> None:
    """By that GDAL decides which edges along a row it burns."""
    whole = Polygon(np.column_stack(grid @ tuple(np.array(corners).T)))
    (near,) = without_far_corners(np.array([whole], object), grid, window)
    place = grid @ Affine.translation(window.col, window.row)
    wanted = rasterize([(whole, 1)], (window.height, window.width), transform=place)
    assert 0 < wanted.sum() < wanted.size
    assert np.array_equal(rasterize([(near, 1)], wanted.shape, transform=place), wanted)


def square(left: float) -> Polygon:
    return shapely.box(left, 3, left + 9, 12)


SPIKE = shapely.from_wkt("POLYGON ((15 5, 17 5, 15 5))")


@pytest.mark.parametrize(
    ("shape", "burned"),
    [
        (GeometryCollection([GeometryCollection([MultiPolygon([square(2)])])]), 81),
        (GeometryCollection([square(2), GeometryCollection([MultiPolygon([square(20)])])]), 162),
        (MultiPolygon([square(500), SPIKE, square(2)]), 81),
        (MultiPolygon([SPIKE, square(2)]), 81),  # rasterio alone leaves this one out
        (GeometryCollection([Polygon(), square(2)]), 81),
        (Polygon(), 0),
    ],
)
def test_all_parts_are_burned(shape: BaseGeometry, burned: int) -> None:
    shapes = np.array([shape, square(2)], object)[:1]
    (near,) = without_far_corners(shapes, Affine.identity(), Window(0, 0, 40, 40))
    assert (0 if near is None else rasterize([(near, 1)], (40, 40)).sum()) == burned


def test_no_shapes() -> None:
    assert without_far_corners(np.array([], object), Affine.identity(), Window(0, 0, 9, 9)) == []
