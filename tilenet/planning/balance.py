"""Split the layers into contiguous partitions with exactly the smallest possible bottleneck.

Costs come as matrices over blocks of layers: entry [a, b] is the cost of layers a to b − 1 on one
device, infinite where such a partition is impossible. So a block may have any cost (skips that
cross its edges, boundaries, micro-batches in flight), and not only a sum over its layers.
"""

import heapq
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Layer
from tilenet.planning.machines.read import machine
from tilenet.planning.time.layer_time import LayerTime
from tilenet.planning.time.roofline import roofline

Balance = tuple[int, ...]
Cuts = tuple[int, ...]  # 0, where each partition ends, the last at the number of layers
Matrix = NDArray[np.float64]
Together = Mapping[str, tuple[int, int]]  # first and last layer that share a weight, by its name
NOTHING: Together = {}


def blocks_of(balance: Sequence[int]) -> list[tuple[int, int]]:
    """First layer of each partition, and the one behind its last."""
    return list(pairwise(accumulate(balance, initial=0)))


def block_seconds(
    layer_times: Sequence[LayerTime], transfer_s: Sequence[float] | None = None
) -> Matrix:
    """Seconds that each block keeps its device busy for one micro-batch, forward and backward.

    Args:
        layer_times: Seconds of each of the n layers.
        transfer_s: Seconds to hand a map over in front of each layer, and behind the last: n + 1
            values. A block is charged for its input and for the gradient of its output; that is
            cautious, since copies can run during the computation.

    Returns:
        Shape (n + 1, n + 1), infinite where the block is empty.
    """
    sums = np.cumsum([0.0, *(time.forward_s + time.backward_s for time in layer_times)])
    seconds = sums[None, :] - sums[:, None]
    if transfer_s is not None:
        at_edge = np.array(transfer_s, np.float64)
        at_edge[[0, -1]] = 0  # the image and the loss come from nowhere else
        seconds = seconds + at_edge[:, None] + at_edge[None, :]
    return _allowed(seconds)


def least_time(
    seconds: ArrayLike,
    num_partitions: int,
    num_bytes: ArrayLike | None = None,
    limit_bytes: float | None = None,
    few: int = 4,
) -> list[Balance]:
    """Return the balances with the fastest slowest partition, each partition within the limit.

    Args:
        seconds: Seconds of each block, shape (n + 1, n + 1).
        num_partitions: Number of blocks.
        num_bytes: Bytes of each block; decides between balances of equal time.
        limit_bytes: Most bytes of a block; None for no limit.
        few: Most balances to return.

    Returns:
        The best distinct balances, best first; none where nothing fits.
    """
    time, room = _allowed(seconds), None if num_bytes is None else _allowed(num_bytes)
    if room is not None and limit_bytes is not None:
        time = np.where(room <= limit_bytes, time, np.inf)
    return _best(time, room, num_partitions, few)


def least_bytes(
    num_bytes: ArrayLike, num_partitions: int, seconds: ArrayLike | None = None, few: int = 4
) -> list[Balance]:
    """Return the balances with the smallest largest partition; `seconds` decide between equals.

    Returns:
        The best distinct balances, best first; none where no balance is possible.
    """
    time = None if seconds is None else _allowed(seconds)
    return _best(_allowed(num_bytes), time, num_partitions, few)


def likely_balance(
    layers: tuple[Layer, ...],
    size_px: tuple[int, int],
    num_partitions: int,
    together: Together = NOTHING,
) -> Balance:
    """The fastest balance by the roofline of this machine, where the user named none.

    It need not be the best: a balance never changes the result. `tilenet plan` knows the machine
    and its memory.

    Args:
        together: Layers that stay in one partition, as for `check_balance`.

    Raises:
        TilenetError: There are not as many places to cut at.
    """
    seconds = block_seconds(roofline(layers, *size_px, "float32", machine("local")))
    check_partitions(num_partitions, len(layers), together)
    return least_time(without_cuts(seconds, together), num_partitions, few=1)[0]


def without_cuts(blocks: Matrix, together: Together) -> Matrix:
    """Costs of blocks, infinite where layers that share a weight would be parted."""
    barred = _barred(together)
    blocks[barred, :] = blocks[:, barred] = np.inf
    return blocks


def most_partitions(num_layers: int, together: Together = NOTHING) -> int:
    """Return the largest possible number of partitions."""
    return num_layers - len(_barred(together))


def check_partitions(num_partitions: int, num_layers: int, together: Together = NOTHING) -> None:
    """Refuse more partitions than there are places to cut at.

    Args:
        together: Layers that stay in one partition, as for `check_balance`.

    Raises:
        TilenetError: There are more; the error names the largest possible number.
    """
    if num_partitions > num_layers:
        check_balance([1] * num_partitions, num_layers)  # says so
    most = most_partitions(num_layers, together)
    if num_partitions > most:
        raise TilenetError(
            f"layers that share a weight stay in one partition (layers: {num_layers}, between "
            f"which they may be cut: {most - 1} places, partitions: {num_partitions}, "
            f"{_longest(together)}); ask for at most {most} partitions"
        )


def _barred(together: Together) -> list[int]:
    """Return the layers that no partition may begin with."""
    return sorted({cut for a, b in together.values() for cut in range(a + 1, b + 1)})


def _longest(together: Together) -> str:
    """Describe the weight with its layers farthest apart."""
    name, (first, last) = max(together.items(), key=lambda item: item[1][1] - item[1][0])
    return f"{name}: layers {first} to {last}"


def check_balance(
    balance: Sequence[int],
    num_layers: int,
    num_partitions: int | None = None,
    together: Together = NOTHING,
) -> None:
    """Refuse a balance that does not split the network.

    Args:
        together: First and last of the layers that share a weight, by the weight's name.

    Raises:
        TilenetError: It does not; the error names the rule, the values and the remedy.
    """
    text = f"[{', '.join(map(str, balance))}]"
    if len(balance) > num_layers or (num_partitions or 0) > num_layers:
        raise TilenetError(
            f"every partition needs a layer (layers: {num_layers}, partitions: "
            f"{max(len(balance), num_partitions or 0)}); ask for at most {num_layers} partitions"
        )
    if num_partitions is not None and len(balance) != num_partitions:
        raise TilenetError(
            f"a balance has one entry a partition (balance: {text}, partitions: {num_partitions});"
            f" set partitions to {len(balance)} or leave the balance out"
        )
    if any(layers < 1 for layers in balance):
        raise TilenetError(
            f"every partition needs a layer (balance: {text}); leave out the entries below 1"
        )
    if sum(balance) != num_layers:
        raise TilenetError(
            f"a balance must add up to the number of layers (balance: {text}, sum: "
            f"{sum(balance)}, layers: {num_layers}); correct it by {num_layers - sum(balance):+d} "
            "or leave it out"
        )
    for name, (first, last) in together.items():
        if any(first < cut <= last for cut in accumulate(balance)):
            raise TilenetError(
                f"layers that share a weight stay in one partition (balance: {text}, {name}: "
                f"layers {first} to {last}); cut before or behind them, or leave the balance out"
            )


def _allowed(matrix: ArrayLike) -> Matrix:
    """The matrix with infinity wherever a block is empty."""
    values = np.asarray(matrix, np.float64)
    below = np.tri(len(values), dtype=bool)
    return np.where(below, np.inf, values)


def _suffixes(cost: Matrix, num_partitions: int) -> Matrix:
    """Entry [r, a]: the smallest bottleneck of layers a to the end in r blocks."""
    best = np.full((num_partitions + 1, len(cost)), np.inf)
    best[0, -1] = -np.inf  # nothing left, nothing to split: never the bottleneck
    for rest in range(1, num_partitions + 1):
        best[rest] = np.maximum(cost, best[rest - 1]).min(axis=1)
    return best


def _best(first: Matrix, second: Matrix | None, num_partitions: int, few: int) -> list[Balance]:
    """The balances least in (bottleneck of the first cost, bottleneck of the second).

    The best balance of a set is found by dynamic programming; the rest of the set is cut into sets
    that share its first cuts and avoid its next one, and the best of all sets comes next
    (E. Lawler, Management Science 18(7), 1972).
    """
    second = first if second is None else second
    search = _Search(np.where(np.isinf(second), np.inf, first), second, num_partitions)
    # of each set: its best, as (bottlenecks, cuts), and the cuts that define it
    queue: list[tuple[tuple[float, float], Cuts, int, frozenset[int]]] = []

    def consider(fixed: Cuts, without: frozenset[int]) -> None:
        candidate = search.best(fixed, without)
        if candidate is not None:
            heapq.heappush(queue, (*candidate, len(fixed), without))

    consider((0,), frozenset())
    balances: list[Balance] = []
    while queue and len(balances) < few:
        _, cuts, num_fixed, without = heapq.heappop(queue)
        balances.append(tuple(b - a for a, b in pairwise(cuts)))
        for place in range(num_fixed, num_partitions):
            consider(cuts[:place], without | {cuts[place]})
            without = frozenset()
    return balances


class _Search:
    """Best completions of the first cuts, with the tables that they share."""

    def __init__(self, first: Matrix, second: Matrix, num_partitions: int) -> None:
        self.first = first
        self.second = second
        self.num_partitions = num_partitions
        self.firsts = _suffixes(first, num_partitions)
        self.seconds: dict[float, tuple[Matrix, Matrix]] = {}

    def best(self, fixed: Cuts, without: frozenset[int]) -> tuple[tuple[float, float], Cuts] | None:
        """Return the best balance with these first cuts and a next cut that `without` lacks."""
        rest = self.num_partitions - len(fixed)
        if rest < 0:
            return None
        start = fixed[-1]
        barred = sorted(without)
        next_first = np.maximum(self.first[start], self.firsts[rest])
        next_first[barred] = np.inf
        least_first = max([next_first.min(), *(self.first[a, b] for a, b in pairwise(fixed))])
        if np.isinf(least_first):
            return None
        second, seconds = self._second(float(least_first))
        next_second = np.maximum(second[start], seconds[rest])
        next_second[barred] = np.inf
        least_second = max([next_second.min(), *(self.second[a, b] for a, b in pairwise(fixed))])
        cuts = [*fixed, int(next_second.argmin())]
        for left in range(rest - 1, -1, -1):
            # the best for the layers left, and not merely as good as the bottleneck allows
            cuts.append(int(np.maximum(second[cuts[-1]], seconds[left]).argmin()))
        return (float(least_first), float(least_second)), tuple(cuts)

    def _second(self, least_first: float) -> tuple[Matrix, Matrix]:
        """Return the second cost of blocks with no larger first cost, and its suffixes."""
        if least_first not in self.seconds:
            cost = np.where(self.first <= least_first, self.second, np.inf)
            self.seconds[least_first] = cost, _suffixes(cost, self.num_partitions)
        return self.seconds[least_first]
