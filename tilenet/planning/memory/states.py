"""The optimizer's states of each weight, and whether ranks share them out."""

from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

AVERAGED = "+ema"  # with an average of the weights, whole on each rank as these are
_STATES = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}
OPTIMIZER_STATES = _STATES | {kind + AVERAGED: many + 1 for kind, many in _STATES.items()}
Shard = Literal["auto", "always", "never"]
WORTH_BYTES = 64 << 20  # less is little next to a process's own memory
N = TypeVar("N", int, NDArray[np.int64])


def sharers(shard: Shard, optimizer: str, parameter_bytes: int, ranks: int) -> int:
    """Ranks that share out the optimizer's states: all of them, or 1 where each keeps all.

    Args:
        shard: `auto`: where a rank would keep more than 64 MiB of them.
        optimizer: `adamw`, `sgd-momentum` or `sgd`, with `+ema` where weights are averaged.
    """
    worth = states_kept(optimizer)[0] * parameter_bytes > WORTH_BYTES
    return ranks if shard == "always" or (shard == "auto" and worth) else 1


def states_kept(optimizer: str) -> tuple[int, int]:
    """Return the values per parameter that ranks may share out, and those that each rank keeps."""
    return _STATES[optimizer.removesuffix(AVERAGED)], int(optimizer.endswith(AVERAGED))


def state_bytes(optimizer: str, parameter_bytes: N, sharers: int) -> N:
    """Bytes of states that a rank keeps of weights on a device; the same on all, to one weight."""
    shared, whole = states_kept(optimizer)
    return shared * -(-parameter_bytes // sharers) + whole * parameter_bytes
