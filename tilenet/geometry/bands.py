"""Divide tiles among ranks that sweep: bands of each column of tiles, from top to bottom.

A rank sweeps a band without a break, row of tiles after row of tiles, so that only the band's
outermost tiles read a halo. One rank and one column of tiles read every pixel once.

A tile's numbers are the same to the last bit in every band, because layers compute the same rows at
a time for it: strips are rows of tiles wherever a band begins, and a band begins one strip before
its halo. In that first strip layers compute more rows at a time, which its tiles do not look at.

Where columns exchange their halos, each rank sweeps one column, all at the same pace.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tilenet.geometry.tiles import Span, Tiling
from tilenet.geometry.windows import Window


@dataclass(frozen=True)
class Band:
    """Neighbouring tiles of a column, which a rank sweeps without a break.

    Attributes:
        tiles: Numbers of the tiles, from the top.
        strips: Rows of tiles that are read until the band's own tiles are done; the sweep may end
            before the last one.
        part: The window of all strips.
    """

    tiles: tuple[int, ...]
    strips: tuple[Span, ...]
    part: Window


def bands(tiling: Tiling, numbers: Sequence[int], parts: int) -> list[list[Band]]:
    """Share tiles out over ranks as evenly as possible, and group each rank's tiles into bands.

    Args:
        tiling: A tiling with the exact halo.
        numbers: Numbers of the tiles, in any order.
        parts: Number of ranks; where columns exchange halos, the number of columns.

    Returns:
        One list per rank.
    """
    num_cols = tiling.grid[1]
    if tiling.rule.exchanged:
        assert parts == num_cols
        places = [number // num_cols for number in numbers]
        rows = range(min(places), max(places) + 1) if places else ()
        columns = [[row * num_cols + col for row in rows] for col in range(parts)]
        return [[_band(tiling, run)] if run else [] for run in columns]
    in_columns = sorted(numbers, key=lambda number: (number % num_cols, number))
    edges = [len(in_columns) * part // parts for part in range(parts + 1)]
    shares = []
    for first, stop in pairwise(edges):
        runs: list[list[int]] = []
        for number in in_columns[first:stop]:
            if runs and number == runs[-1][-1] + num_cols:
                runs[-1].append(number)
            else:
                runs.append([number])
        shares.append([_band(tiling, run) for run in runs])
    return shares


def _band(tiling: Tiling, run: list[int]) -> Band:
    num_cols, halo_px, rows = tiling.grid[1], tiling.rule.halo_px, tiling.rows
    top, bottom = rows[run[0] // num_cols], rows[run[-1] // num_cols]
    first = max(_strip_at(rows, max(top.first - halo_px, 0)) - 1, 0)
    stop = _strip_at(rows, min(bottom.first + bottom.own + halo_px, tiling.extended[0]) - 1) + 1
    strips, col = rows[first : stop + 1], tiling.cols[run[0] % num_cols]
    height = strips[-1].first + strips[-1].own - strips[0].first
    part = Window(strips[0].first, col.start, height, col.read)
    return Band(tuple(run), strips, part)


def _strip_at(rows: tuple[Span, ...], row: int) -> int:
    return bisect(rows, row, key=lambda span: span.first) - 1


def read_ratio(tiling: Tiling, parts: int) -> float:
    """Pixels read per pixel of the image, as if all ranks read as many as the busiest one."""
    shares = bands(tiling, range(len(tiling.tiles)), parts)
    most = max(sum(band.part.height * band.part.width for band in share) for share in shares)
    return most * parts / (tiling.height * tiling.width)
