"""Tensors that forward computes without a map: numbers that all cells share, or coordinates.

They are computed while the graph is interpreted, in float64, until they meet a map (`laid.py`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilenet.adoption.calls import NO_MAP, Call
from tilenet.adoption.proof.as_defined import wide_numbers

# Narrower types hold the cells of small maps only.
WIDE = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)


@dataclass(frozen=True, eq=False)
class Mapless:
    """A tensor that is computed from numbers alone, at the size at which the graph is recorded.

    Attributes:
        call, function, args, kwargs: The call that computed it, and its arguments.
        number: Its place among several results of the call; None: the call has one result.
    """

    tensor: Tensor
    call: Call
    function: Any
    args: Any
    kwargs: dict[str, Any]
    number: int | None = None

    def recompute(self, old: "Mapless", new: Tensor) -> Tensor:
        """Call again with `new` in place of the tensor `old`, and 0.5 in place of all others."""

        def replace(argument: Any) -> Any:
            if isinstance(argument, list):
                return [replace(part) for part in argument]
            if not isinstance(argument, Mapless):
                return _wide(argument)
            if argument is old:
                return new
            return torch.full_like(argument.tensor, 0.5, dtype=torch.float64)

        kwargs = {name: replace(argument) for name, argument in self.kwargs.items()}
        result = self.function(*replace(self.args), **kwargs)
        return result if self.number is None else result[self.number]  # type: ignore[no-any-return]


def compute_mapless(call: Call, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operator on numbers and mapless tensors, or the refusal of the call."""
    refused = call.refused(NO_MAP)
    if torch.Tag.nondeterministic_seeded in function.tags or "empty" in call.operator:
        return refused
    try:
        with wide_numbers():
            result = function(*_wide(args), **{name: _wide(x) for name, x in kwargs.items()})
    except Exception:  # the operator does not take such numbers
        return refused
    several = list(result) if isinstance(result, list | tuple) else [result]
    if any(tensor.dtype not in WIDE for tensor in several):
        return call.refused("numbers are made in forward in a type of few bits")
    if isinstance(result, list | tuple):
        return [Mapless(tensor, call, function, args, kwargs, n) for n, tensor in enumerate(result)]
    return Mapless(result, call, function, args, kwargs)


def _wide(argument: Any) -> Any:
    """Arguments for a call in float64, which stands for the map's own precision."""
    if isinstance(argument, list):
        return [_wide(part) for part in argument]
    if isinstance(argument, Mapless):
        return argument.tensor
    return torch.float64 if argument is torch.float32 else argument
