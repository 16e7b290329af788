"""Tensors that are made of no map, where they meet one: numbers for all of it, or coordinates.

Coordinates are even steps along rows and columns, which depend on the map's size such that they
are round numbers; that it is so at other sizes too, the proof says. A tensor that is none is made
of its arguments again, once these are laid on the map, by an operator of cells.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilenet.adoption.calls import Call, Refusal
from tilenet.adoption.cells import (
    BATCH,
    COLS,
    ROWS,
    Cells,
    Dim,
    cells_of,
    constant_of,
    maps_in,
)
from tilenet.adoption.cellwise import from_map
from tilenet.adoption.made import Made, refusal
from tilenet.adoption.values import Value
from tilenet.errors import TilenetError
from tilenet.geometry.coordinates import OFFSETS, Coordinates

__all__ = ["laid_on"]

ROUNDING = 1e-9
TENTHS = 10  # numbers that people write are whole numbers of them
MOST_EPSILON = 1e-3  # that people add to what they divide by
PLACES = (BATCH,), (ROWS,), (COLS,)

Run = Callable[[Call, Any, Any, dict[str, Any]], Any]


def laid_on(call: Call, tensors: Sequence[Cells], run: Run, argument: Any) -> Any:
    """An argument in which tensors that are made are laid on what the operator takes as well.

    Args:
        run: Makes cells of a call's function and arguments.
    """
    if isinstance(argument, list):
        return [laid_on(call, tensors, run, one) for one in argument]
    if not isinstance(argument, Made):
        return argument
    tensor = argument.tensor
    like = next((one for one in tensors if one.size), None)
    if like is None and tensor.dim() == 4:  # under a kernel
        maps = (one for one in call.maps if one.size == tensor.shape[2:] and not one.whole)
        like = next(map(cells_of, maps), None)
    if like is None or tensor.dtype == torch.bool:
        raise refusal(call)
    shape = *[1] * (len(like.dims) - tensor.dim()), *tensor.shape
    over_cells = [place for place in range(len(like.dims)) if like.over_cells(place)]
    if all(shape[place - len(like.dims)] == 1 for place in over_cells):
        return constant_of("a tensor", tensor.double())
    value = next((one for one in maps_in(like) if one.size == like.size and not one.whole), None)
    if value is None or not set(PLACES) <= set(like.dims) or len(shape) > len(like.dims):
        raise refusal(call)
    dims = tuple(
        dim if like.over_cells(place) else (n,) * (n > 1)
        for place, (dim, n) in enumerate(zip(like.dims, shape, strict=True))
    )
    return _Laying(call, value, run).of(argument, dims)


@dataclass(frozen=True)
class _Laying:
    """How tensors are laid on a map.

    Attributes:
        call: What takes them with it.
        value: A map of its size.
        run: Makes cells of a call's function and arguments.
        done: What has been laid.
    """

    call: Call
    value: Value
    run: Run
    done: dict[tuple[Made, tuple[Dim, ...]], Any] = field(default_factory=dict)

    def of(self, one: Made, dims: tuple[Dim, ...]) -> Any:
        """A tensor as coordinates, or as what an operator makes of such.

        Args:
            dims: What its dimensions run over; there may be more in front of them.
        """
        if (one, dims) not in self.done:
            self.done[one, dims] = self._laid(one, dims)
        return self.done[one, dims]

    def _laid(self, one: Made, dims: tuple[Dim, ...]) -> Any:
        there = set(PLACES) & set(dims)
        if not there:
            return constant_of("a tensor", one.tensor.double())
        if len(there) < len(PLACES):
            raise self._uneven
        tensor = one.tensor.double()[(None,) * (len(dims) - one.tensor.dim())]
        maps = tensor.movedim([dims.index(dim) for dim in PLACES], (0, -2, -1))
        maps = maps.reshape(maps.shape[0], -1, *maps.shape[-2:])
        layer, is_round = _coordinates(maps, self.value.channels)
        if layer is None or not is_round:
            try:
                return self._of_arguments(one, dims)
            except TilenetError:
                if layer is None:
                    raise
        laid = Value(layer.out_channels, self.value.size, layer=layer, inputs=(self.value,))
        return from_map(cells_of(self.call.entered(laid)), dims)

    def _of_arguments(self, one: Made, dims: tuple[Dim, ...]) -> Any:
        """What the operator that made a tensor makes of its arguments, once these are laid."""

        def laid(argument: Any) -> Any:
            if isinstance(argument, list):
                return [laid(part) for part in argument]
            if not isinstance(argument, Made):
                return argument
            return self.of(argument, _traced(one, argument, dims))

        try:
            named = {name: laid(part) for name, part in one.named.items()}
            result = self.run(one.call, one.function, laid(one.args), named)
            result = result if one.number is None else result[one.number]
        except Exception as error:  # of an operator that takes no such numbers
            raise self._uneven from error
        if not isinstance(result, Cells):
            raise self._uneven
        return result

    @property
    def _uneven(self) -> Refusal:
        why = "numbers that differ by cells are made in forward in uneven steps"
        return self.call.refused(why)


def _traced(result: Made, argument: Made, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """What dimensions of an argument run over: what of its result changes along with them."""

    def over(place: int) -> Dim:
        n = argument.tensor.shape[place]
        along = torch.linspace(0.1, 0.9, n, dtype=torch.float64)
        numbers = along.expand(
            *argument.tensor.shape[:place], *argument.tensor.shape[place + 1 :], n
        )
        found = result.of(argument, numbers.movedim(-1, place).contiguous())
        changing = [
            dim
            for axis, dim in enumerate(dims, found.dim() - len(dims))
            if axis >= 0 and dim in PLACES and bool((found != found.narrow(axis, 0, 1)).any())
        ]
        if len(changing) > 1:
            raise ValueError(f"a dimension of {n} runs over {changing}")
        return changing[0] if changing else (n,) * (n > 1)

    return tuple(map(over, range(argument.tensor.dim())))


def _coordinates(maps: Tensor, channels: int) -> tuple[Coordinates | None, bool]:
    """The layer of numbers (B, C, H, W), and whether its own are round; None: steps are uneven.

    They are the same for each image; H or W may be 1.
    """
    _, wide, rows, cols = maps.shape
    start = maps[0, :, 0, 0]
    ends = torch.stack([maps[0, :, -1, 0], maps[0, :, 0, -1]], 1)
    steps = (ends - start[:, None]) / (torch.tensor([rows, cols]) - 1).clamp(min=1)
    down, right = steps[:, :, None, None].unbind(1)
    even = start[:, None, None] + down * torch.arange(rows)[:, None] + right * torch.arange(cols)
    if not (even - maps).abs().max() <= ROUNDING * maps.abs().max():
        return None, False
    counted = set(steps.abs().sum(1).tolist()) <= {0.0, 1.0}
    units = ["cells"] if counted else list(OFFSETS)
    found = [_in_unit(unit, start, steps, (rows, cols)) for unit in units]
    layers = [Coordinates(channels, wide, *one) for one in found]
    return next(((one, True) for one in layers if _is_round(one)), (layers[0], False))


def _in_unit(
    unit: Any, start: Tensor, steps: Tensor, size: tuple[int, int]
) -> tuple[tuple[float, ...], Any, float]:
    """Numbers of a layer in a unit, and what is added to what it divides by."""
    start, epsilon = start - OFFSETS[unit] * steps.sum(1), 0.0
    if unit != "cells":
        spans = (torch.tensor(size).double() - int(unit == "ends")).clamp(min=1).expand(steps.shape)
        most = steps.abs().argmax()
        step, span = steps.flatten()[most], spans.flatten()[most]
        added = float((step * span * TENTHS).round() / TENTHS / step - span)
        epsilon = float(f"{added:.2e}") if ROUNDING < added < MOST_EPSILON else 0.0
        steps = steps * (spans + epsilon)
    return tuple(torch.cat([start[:, None], steps], 1).flatten().tolist()), unit, epsilon


def _is_round(layer: Coordinates) -> bool:
    tenths = torch.tensor(layer.numbers, dtype=torch.float64) * TENTHS
    return bool(((tenths - tenths.round()).abs() <= ROUNDING).all())
