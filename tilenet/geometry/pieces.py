"""Cut windows into pieces that one rank can take up one at a time."""

from collections.abc import Iterator

from tilenet.geometry.tiles import Tiling, Window

__all__ = ["own_pieces", "pieces_of"]


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


def _parts(first: int, own: int, most: int) -> Iterator[tuple[int, int]]:
    end = first + own
    while first < end:
        stop = min((first // most + 1) * most, end)
        yield first, stop - first
        first = stop
