"""How others split a network: the rules that tilenet's balances are measured against.

`deepspeed` was written again from the description of DeepSpeed's `partition_balanced`: dynamic
programming over (layers, partitions) whose state is the smallest difference between the largest and
the smallest partition so far. That difference has no optimal substructure.
"""

from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray
from torchgpipe.balance import blockpartition

__all__ = ["PAPER", "block_partition", "deepspeed", "even"]

Balance = tuple[int, ...]

# made by hand for the paper's three models, on the six GPUs of a Summit node
PAPER: dict[str, Balance] = {
    "small": (14, 24, 30, 22, 12, 7),
    "medium-2": (16, 26, 38, 26, 12, 11),
    "large": (18, 30, 44, 30, 14, 13),
}


def block_partition(costs: list[float], num_partitions: int) -> Balance:
    """torchgpipe's own, by what `balance_by_time` and `balance_by_size` call."""
    return tuple(len(block) for block in blockpartition.solve(costs, num_partitions))


def even(costs: list[float], num_partitions: int) -> Balance:
    """As many layers everywhere as the number allows, the rest to the first partitions."""
    share, rest = divmod(len(costs), num_partitions)
    return tuple(share + (number < rest) for number in range(num_partitions))


def deepspeed(costs: list[float], num_partitions: int) -> Balance:
    """The smallest difference between largest and smallest partition, by DeepSpeed's recurrence."""
    n = len(costs)
    sums = np.array([0.0, *accumulate(costs)])
    largest: NDArray[np.float64] = np.full((num_partitions + 1, n + 1), np.inf)
    smallest = np.full_like(largest, np.inf)
    largest[0, 0] = -np.inf
    came_from = np.zeros(largest.shape, int)
    for number in range(1, num_partitions + 1):
        for end in range(number, n + 1):
            block = sums[end] - sums[:end]
            most = np.maximum(largest[number - 1, :end], block)
            least = np.minimum(smallest[number - 1, :end], block)
            start = int(np.where(np.isinf(most), np.inf, most - least).argmin())
            largest[number, end], smallest[number, end] = most[start], least[start]
            came_from[number, end] = start
    cuts = [n]
    for number in range(num_partitions, 0, -1):
        cuts.insert(0, int(came_from[number, cuts[0]]))
    return tuple(b - a for a, b in pairwise(cuts))
