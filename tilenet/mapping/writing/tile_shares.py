"""Which tiles of a file each rank compresses: as much work for each, in turns that memory takes."""

from collections.abc import Sequence

import numpy as np

__all__ = ["share_tiles", "tile_cost"]

# CPU time of a tile, over that of a tile of the map, by how often its pixels are halved: zero, one
# or two times (`python -m bench map_finish`).
CLASS_COSTS, SCORE_COSTS = (1.0, 5.8, 9.3), (1.0, 1.6, 2.3)


def tile_cost(halved: int, *, classes: bool) -> float:
    """Work of a tile whose pixels are halved so often, at most twice; at least 1."""
    return (CLASS_COSTS if classes else SCORE_COSTS)[halved]


def share_tiles(costs: Sequence[float], ranks: int, most: int) -> list[list[int]]:
    """Divide tiles among ranks, in as few turns of equal work as there can be.

    A tile belongs to the share in which the middle of its work lies.

    Args:
        costs: Work of each tile, in the order of the file, each at least 1.
        most: Work of a rank in a turn, and so about the number of its tiles.

    Returns:
        Of each turn the first tile of each rank, and the tile behind those of the last rank.
    """
    if not costs:
        return []
    work = np.asarray(costs)
    ends = np.cumsum(work)
    turns = int(np.ceil(ends[-1] / (most * ranks)))
    begins = np.linspace(0, ends[-1], turns * ranks + 1)
    firsts = np.searchsorted(ends - work / 2, begins).tolist()
    shares = (firsts[turn * ranks : (turn + 1) * ranks + 1] for turn in range(turns))
    # A tile may be more work than all ranks do in a turn.
    return [share for share in shares if share[0] < share[-1]]
