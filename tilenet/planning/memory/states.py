"""What the optimizer keeps of each weight, and whether ranks share it out."""

from typing import Any, Literal, TypeVar

__all__ = ["AVERAGED", "OPTIMIZER_STATES", "Shard", "sharers", "state_bytes", "states_of_rank"]

AVERAGED = "+ema"  # with an average of the weights, whole on each rank as these are
_STATES = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}
OPTIMIZER_STATES = _STATES | {kind + AVERAGED: many + 1 for kind, many in _STATES.items()}
Shard = Literal["auto", "always", "never"]
Bytes = TypeVar("Bytes", int, Any)  # a number, or numpy's array of them
WORTH_BYTES = 64 << 20  # less is little next to a process's own memory


def sharers(shard: Shard, optimizer: str, parameter_bytes: int, ranks: int) -> int:
    """Ranks that share out the optimizer's states: all of them, or 1 where each keeps all.

    Args:
        shard: `auto`: where a rank would keep more than 64 MiB of them.
        optimizer: `adamw`, `sgd-momentum` or `sgd`, with `+ema` where weights are averaged.
        parameter_bytes: Bytes of all weights.
        ranks: Ranks of the run.
    """
    worth = _shared(optimizer) * parameter_bytes > WORTH_BYTES
    return ranks if shard == "always" or (shard == "auto" and worth) else 1


def _shared(optimizer: str) -> int:
    return _STATES[optimizer.removesuffix(AVERAGED)]


def states_of_rank(optimizer: str, sharers: int) -> float:
    """Values that a rank keeps per parameter."""
    return _shared(optimizer) / sharers + optimizer.endswith(AVERAGED)


def state_bytes(optimizer: str, parameter_bytes: Bytes, sharers: int = 1) -> Bytes:
    """Bytes of states that a rank keeps of weights on a device; the same on all, to one weight."""
    shared: Bytes = _shared(optimizer) * -(-parameter_bytes // sharers)
    return shared + parameter_bytes if optimizer.endswith(AVERAGED) else shared
