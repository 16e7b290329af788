"""Which tiles each rank compresses: as much work for each, in rounds that memory takes."""

from collections.abc import Sequence

import numpy as np

# CPU time of a tile, over that of a tile of the map, by how often its pixels are halved: zero, one
# or two times (`python -m bench map_finish`).
CLASS_COSTS, SCORE_COSTS = (1.0, 5.8, 9.3), (1.0, 1.6, 2.3)


def tile_cost(halved: int, *, classes: bool) -> float:
    """Work of a tile whose pixels are halved so often, at most twice; at least 1."""
    return (CLASS_COSTS if classes else SCORE_COSTS)[halved]


def share_tiles(costs: Sequence[float], ranks: int, most: int) -> list[list[int]]:
    """Divide tiles among ranks, in as few rounds of equal work as there can be.

    A tile belongs to the share in which the middle of its work lies.

    Args:
        costs: Work of each tile, in the order of the file, each at least 1.
        most: Work of a rank in a round, and so the number of its tiles, at most.

    Returns:
        Of each round the first tile of each rank, and the tile behind those of the last rank.
    """
    if not costs:
        return []
    work = np.asarray(costs)
    ends = np.cumsum(work)
    rounds = int(np.ceil(ends[-1] / (most * ranks)))
    begins = np.linspace(0, ends[-1], rounds * ranks + 1)
    firsts = np.searchsorted(ends - work / 2, begins).tolist()
    shares = (firsts[n * ranks : (n + 1) * ranks + 1] for n in range(rounds))
    # A tile may be more work than all ranks do in a round.
    return [share for share in shares if share[0] < share[-1]]
