"""What a run swapped, said once at its end."""

from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from tilenet.parallel.progress import say
from tilenet.parallel.swap_statistics import SwapCounts

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["say_swaps"]


def say_swaps(comm: "MPI.Intracomm", swaps: SwapCounts, seconds: float) -> None:
    """Say what all ranks swapped, where any did. Collective.

    Args:
        comm: The ranks.
        swaps: Of this rank's steps.
        seconds: Of these steps.
    """
    # All ranks wait for the first, which may be writing a trace: what a run leaves is there when
    # any of them returns.
    ranks = comm.allgather((swaps, seconds))
    total = reduce(add, (of_rank for of_rank, _ in ranks))
    if comm.rank > 0 or total.out_count + total.in_count == 0:
        return
    waited, of_seconds = max((of_rank.wait_seconds, lasted) for of_rank, lasted in ranks)
    say(
        f"swapped: {_size(total.out_bytes)} out ({total.out_count:,} tensors), "
        f"{_size(total.in_bytes)} in ({total.in_count:,}); of a rank at most "
        f"{_size(total.peak_host_bytes)} were out and {_size(total.peak_active_bytes)} waited for "
        f"backward on its devices; {waited:.1f} s waited of {of_seconds:.1f} s"
        + " on the rank that waited longest"
        * (len(ranks) > 1)
    )


def _size(num_bytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"
