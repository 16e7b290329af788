"""In which parts every so many-th pixel of a large window is read.

GDAL takes such pixels band by band, and of files that hold bands pixel by pixel it decodes every
block once for each band that its cache has lost it for. Parts that the cache holds are decoded once
(measured: 10 000² × 4 in blocks of 512² and its labels, 9.4 s as a whole and 4.8 s in parts).
"""

from tilenet.geometry.tiles import Window

__all__ = ["sample_parts"]

PART_PX = 1 << 21  # of the file: 16 MB of 4 bands of 16 bits, a quarter of the cache


def sample_parts(
    window: Window, size: tuple[int, int], block: tuple[int, int]
) -> list[tuple[slice, slice, Window]]:
    """Rows and columns of the picture, and the part of the window that they are taken from.

    One part where pixels do not divide the window evenly: others would be taken near its edges.

    Args:
        window: Of the file's pixels.
        size: Rows and columns that are taken of it.
        block: Rows and columns of the file's blocks; no part is narrower, save the last.
    """
    if window.height % size[0] or window.width % size[1]:
        return [(slice(0, size[0]), slice(0, size[1]), window)]
    high, wide = window.height // size[0], window.width // size[1]  # pixels that one is taken of
    rows = max(1, block[0] // high)
    cols = max(PART_PX // (rows * high) // wide, -(-block[1] // wide))
    return [
        (
            slice(row, row + count),
            slice(col, col + across),
            Window(window.row + row * high, window.col + col * wide, count * high, across * wide),
        )
        for row in range(0, size[0], rows)
        for col in range(0, size[1], cols)
        for count in [min(rows, size[0] - row)]
        for across in [min(cols, size[1] - col)]
    ]
