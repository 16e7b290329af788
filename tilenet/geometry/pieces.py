"""Cut windows into pieces that one rank can take up one at a time."""

from collections.abc import Iterator

from tilenet.geometry.tiles import Tiling
from tilenet.geometry.windows import Window

__all__ = ["own_pieces", "pieces_of", "strips_of", "within"]


def own_pieces(tiling: Tiling, height_px: int, width_px: int) -> Iterator[tuple[int, Window]]:
    """Windows of at most `height_px` × `width_px` that partition all own windows.

    Strip by strip from the top, left to right, each with the number of the tile that owns it.
    Pieces end at multiples of their sizes, where the blocks of the map's file end too.
    """
    num_cols = len(tiling.cols)
    for row, rows in enumerate(tiling.rows):
        for top, height in _parts(rows.first, rows.own, height_px):
            for col, cols in enumerate(tiling.cols):
                for left, width in _parts(cols.first, cols.own, width_px):
                    yield row * num_cols + col, Window(top, left, height, width)


def pieces_of(window: Window, most_px: int) -> Iterator[Window]:
    """Windows of at most `most_px` a side that partition a window, row by row."""
    for top, height in _parts(window.row, window.height, most_px):
        for left, width in _parts(window.col, window.width, most_px):
            yield Window(top, left, height, width)


def strips_of(window: Window, most_px: int) -> Iterator[Window]:
    """Windows of at most `most_px` pixels, at least one, that partition a window.

    As many whole rows as that allows, since files in rows are decoded row by row; of a row that has
    more pixels, parts.
    """
    rows, cols = max(1, most_px // window.width), max(1, min(most_px, window.width))
    for row in range(0, window.height, rows):
        for col in range(0, window.width, cols):
            height, width = min(rows, window.height - row), min(cols, window.width - col)
            yield Window(window.row + row, window.col + col, height, width)


def within(part: Window, window: Window) -> tuple[slice, slice]:
    """Rows and columns of a window that one of its parts takes."""
    row, col = part.row - window.row, part.col - window.col
    return slice(row, row + part.height), slice(col, col + part.width)


def _parts(first: int, own: int, most: int) -> Iterator[tuple[int, int]]:
    end = first + own
    while first < end:
        stop = min((first // most + 1) * most, end)
        yield first, stop - first
        first = stop
