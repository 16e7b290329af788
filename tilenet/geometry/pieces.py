"""Cut windows into pieces that one rank can take up one at a time."""

from collections.abc import Iterator

from tilenet.geometry.windows import Window


def pieces_of(window: Window, most_px: int) -> Iterator[Window]:
    """Windows of at most `most_px` a side that partition a window, row by row."""
    for top, height in parts(window.row, window.height, most_px):
        for left, width in parts(window.col, window.width, most_px):
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


def parts(first: int, own: int, most: int) -> Iterator[tuple[int, int]]:
    """First cell and length of the parts of an interval that is cut at multiples of `most`."""
    end = first + own
    while first < end:
        stop = min((first // most + 1) * most, end)
        yield first, stop - first
        first = stop
