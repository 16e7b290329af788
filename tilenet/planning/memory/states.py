"""What the optimizer keeps of each weight, and whether ranks share it out."""

from typing import Literal

__all__ = ["OPTIMIZER_STATES", "Shard", "sharers", "state_bytes"]

OPTIMIZER_STATES = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}
Shard = Literal["auto", "always", "never"]
WORTH_BYTES = 64 << 20  # less is little next to a process's own memory


def sharers(shard: Shard, optimizer: str, parameter_bytes: int, ranks: int) -> int:
    """Ranks that share out the optimizer's states: all of them, or 1 where each keeps all.

    Args:
        shard: `auto`: where a rank would keep more than 64 MiB of them.
        optimizer: `adamw`, `sgd-momentum` or `sgd`.
        parameter_bytes: Bytes of all weights.
        ranks: Ranks of the run.
    """
    worth = OPTIMIZER_STATES[optimizer] * parameter_bytes > WORTH_BYTES
    return ranks if shard == "always" or (shard == "auto" and worth) else 1


def state_bytes(optimizer: str, parameter_bytes: int, sharers: int = 1) -> int:
    """Bytes of states that a rank keeps of weights on a device; the same on all, to one weight."""
    return OPTIMIZER_STATES[optimizer] * -(-parameter_bytes // sharers)
