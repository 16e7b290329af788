"""Parts of an image: boxes of coordinates and the pixels under them."""

import random
from itertools import product
from math import cos, sin

import pytest
from affine import Affine

from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window, checked_window, overlap, window_of_bbox

SIZE = 70, 90
UPRIGHT = (2.0, 0.0, 5e5, 0.0, -2.0, 4e6)
TURNED = (2 * cos(0.4), 2 * sin(0.4), 5e5, 2 * sin(0.4), -2 * cos(0.4), 4e6)
GRIDS = [UPRIGHT, TURNED, (0.1, 0.0, -7.3, 0.0, -0.1, 46.2), (-3.0, 0.5, 1.0, 0.2, 5.0, 2.0)]


@pytest.mark.parametrize("transform", GRIDS, ids=["upright", "turned", "degrees", "odd"])
def test_the_window_is_the_smallest_that_covers_the_box(transform: tuple[float, ...]) -> None:
    """Its sides are the pixels of the corners that reach farthest."""
    rng = random.Random(3)
    for _ in range(20):
        middle = Affine(*transform) @ (rng.uniform(25, 65), rng.uniform(25, 45))
        half = abs(transform[0]) * rng.uniform(1, 10), abs(transform[0]) * rng.uniform(1, 10)
        xmin, ymin = middle[0] - half[0], middle[1] - half[1]
        xmax, ymax = middle[0] + half[0], middle[1] + half[1]
        found = window_of_bbox((xmin, ymin, xmax, ymax), transform, SIZE)
        corners = product((xmin, xmax), (ymin, ymax))
        cols, rows = zip(*(map(int, ~Affine(*transform) @ one) for one in corners), strict=True)
        assert (found.row, found.row + found.height - 1) == (min(rows), max(rows))
        assert (found.col, found.col + found.width - 1) == (min(cols), max(cols))


@pytest.mark.parametrize("transform", [UPRIGHT, (0.1, 0.0, -7.3, 0.0, -0.1, 46.2)])
def test_a_box_of_whole_pixels_is_those_pixels(transform: tuple[float, ...]) -> None:
    """0.1 is no binary fraction: corners come out a little off the pixels' edges."""
    for row, col, height, width in [(0, 0, 70, 90), (3, 7, 11, 13), (69, 89, 1, 1), (1, 2, 3, 4)]:
        left, top = Affine(*transform) @ (col, row)
        right, bottom = Affine(*transform) @ (col + width, row + height)
        found = window_of_bbox((left, bottom, right, top), transform, SIZE)
        assert found == Window(row, col, height, width)


def test_what_lies_beside_the_image_is_cut_off() -> None:
    found = window_of_bbox((5e5 + 100, 4e6 - 9e6, 9e6, 4e6 - 31), UPRIGHT, SIZE)
    assert found == Window(15, 50, 55, 40)
    tiny = window_of_bbox((5e5 + 1, 4e6 - 3, 5e5 + 1 + 1e-7, 4e6 - 3 + 1e-7), UPRIGHT, SIZE)
    assert tiny == Window(1, 0, 1, 1)
    tiny = window_of_bbox((5e5 + 4, 4e6 - 6 - 1e-7, 5e5 + 4 + 1e-7, 4e6 - 6), UPRIGHT, SIZE)
    assert tiny == Window(3, 2, 1, 1)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("bbox", "sentence"),
    [
        ((5e5, 3.9e6, NAN, 4e6), "four finite numbers"),
        ((5e5, 3.9e6, INF, 4e6), "four finite numbers"),
        ((5e5, 3.9e6, 1e300, 4e6), "four finite numbers"),
        ((5e5, 3.9e6, 5.1e5), "four finite numbers"),
        ((5e5, 3.9e6, 5e5, 4e6), "XMIN below XMAX"),
        ((5e5, 4e6, 5.1e5, 3.9e6), "YMIN below YMAX"),
        ((-3.0, 41.0, -2.0, 42.0), r"touch the image .*image: 500000,3999860,500180,4000000\)"),
        ((5e5 + 180, 3.9e6, 5.1e5, 4e6), "touch the image"),
        ((5e5 - 90, 3.9e6, 5e5, 4e6), "touch the image"),
    ],
)
def test_boxes_that_are_none_of_the_image(bbox: tuple[float, ...], sentence: str) -> None:
    with pytest.raises(TilenetError, match=sentence):
        window_of_bbox(bbox, UPRIGHT, SIZE)


def test_windows_lie_inside() -> None:
    assert checked_window((1, 2, 69, 88), SIZE) == Window(1, 2, 69, 88)
    for numbers in [(1, 2, 70, 3), (1, 2, 3, 89), (-1, 2, 3, 4), (1, 2, 0, 4), (1, 2, 3, -4)]:
        with pytest.raises(TilenetError, match="lies inside the image"):
            checked_window(numbers, SIZE)
    with pytest.raises(TilenetError, match="four whole numbers"):
        checked_window((1, 2, 3), SIZE)


def test_overlap_is_the_pixels_of_both() -> None:
    rng = random.Random(1)
    for _ in range(200):
        one, other = (Window(*(rng.randint(0, 9) for _ in range(4))) for _ in range(2))
        cells = [
            {(r, c) for r in range(w.row, w.row + w.height) for c in range(w.col, w.col + w.width)}
            for w in (one, other)
        ]
        both = cells[0] & cells[1]
        found = overlap(one, other)
        assert (found is None) == (not both)
        if found:
            assert (found.row, found.col) == min(both)
            assert found.height * found.width == len(both)
