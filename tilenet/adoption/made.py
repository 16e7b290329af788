"""Tensors that a forward pass makes of no map: numbers that are the same for all, or coordinates.

They are computed as they are recorded, in float64, until they meet a map (`laid.py`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilenet.adoption.calls import Call, Refusal
from tilenet.adoption.proof.as_defined import wide_numbers

__all__ = ["Made", "made", "refusal"]

# Others hold the cells of small maps only.
WIDE = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)


@dataclass(frozen=True, eq=False)
class Made:
    """A tensor that is computed of numbers alone, as it is at the size that is recorded.

    Attributes:
        tensor: The numbers.
        call, function, args, named: What made it, of what.
        number: Which of several results it is.
    """

    tensor: Tensor
    call: Call
    function: Any
    args: Any
    named: dict[str, Any]
    number: int | None = None

    def of(self, old: "Made", new: Tensor) -> Tensor:
        """What it would be with another tensor in place of one, and a number in place of others."""

        def given(one: Any) -> Any:
            if isinstance(one, list):
                return [given(part) for part in one]
            if not isinstance(one, Made):
                return _wide(one)
            return new if one is old else torch.full_like(one.tensor, 0.5, dtype=torch.float64)

        result = self.function(
            *given(self.args), **{n: given(one) for n, one in self.named.items()}
        )
        return result if self.number is None else result[self.number]  # type: ignore[no-any-return]


def made(call: Call, function: Any, args: Any, named: dict[str, Any]) -> Any:
    """What an operator makes of numbers and such tensors, or the sentence that refuses it."""
    refused = refusal(call)
    if torch.Tag.nondeterministic_seeded in function.tags or "empty" in call.operator:
        return refused
    try:
        with wide_numbers():
            result = function(*_wide(args), **{name: _wide(one) for name, one in named.items()})
    except Exception:  # of tensors that are no numbers here
        return refused
    several = list(result) if isinstance(result, list | tuple) else [result]
    if any(one.dtype not in WIDE for one in several):
        return call.refused("numbers are made in forward in a type of few bits")
    if isinstance(result, list | tuple):
        return [Made(one, call, function, args, named, n) for n, one in enumerate(result)]
    return Made(result, call, function, args, named)


def refusal(call: Call) -> Refusal:
    return call.refused("a tensor is made in forward of no map")


def _wide(argument: Any) -> Any:
    """Arguments in float64, which stands for the map's own precision."""
    if isinstance(argument, list):
        return [_wide(one) for one in argument]
    if isinstance(argument, Made):
        return argument.tensor
    return torch.float64 if argument is torch.float32 else argument
