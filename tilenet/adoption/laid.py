"""Lay tensors that are computed from no map on a map, as constants or as coordinates.

Coordinates are even steps along rows and columns, which depend on the map's size such that they
are round numbers; the proof checks other sizes. Any other tensor is computed again from its
arguments, once these are laid on the map, by an operator of cells.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilenet.adoption.calls import NO_MAP, Call, Refusal
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
from tilenet.adoption.mapless import Mapless
from tilenet.adoption.values import Value
from tilenet.errors import TilenetError
from tilenet.geometry.coordinates import OFFSETS, Coordinates

ROUNDING = 1e-9
TENTHS = 10  # literals in code are whole multiples of a tenth
MOST_EPSILON = 1e-3  # added to a divisor
PLACES = (BATCH,), (ROWS,), (COLS,)

Run = Callable[[Call, Any, Any, dict[str, Any]], Any]


def laid_on(call: Call, tensors: Sequence[Cells], run: Run, argument: Any) -> Any:
    """Return an argument with its mapless tensors laid on the operator's other tensors.

    Args:
        run: Computes cells from a call, its function and its arguments.
    """
    if isinstance(argument, list):
        return [laid_on(call, tensors, run, part) for part in argument]
    if not isinstance(argument, Mapless):
        return argument
    tensor = argument.tensor
    like = next((x for x in tensors if x.size), None)
    if like is None and tensor.dim() == 4:  # under a kernel
        maps = (value for value in call.maps if value.size == tensor.shape[2:] and not value.whole)
        like = next(map(cells_of, maps), None)
    if like is None or tensor.dtype == torch.bool:
        raise call.refused(NO_MAP)
    shape = *[1] * (len(like.dims) - tensor.dim()), *tensor.shape
    over_cells = [place for place in range(len(like.dims)) if like.over_cells(place)]
    if all(shape[place - len(like.dims)] == 1 for place in over_cells):
        return constant_of("a tensor", tensor.double())
    value = next((v for v in maps_in(like) if v.size == like.size and not v.whole), None)
    if value is None or not set(PLACES) <= set(like.dims) or len(shape) > len(like.dims):
        raise call.refused(NO_MAP)
    dims = tuple(
        dim if like.over_cells(place) else (n,) * (n > 1)
        for place, (dim, n) in enumerate(zip(like.dims, shape, strict=True))
    )
    return _Laying(call, value, run).of(argument, dims)


@dataclass(frozen=True)
class _Laying:
    """Lays tensors on a map.

    Attributes:
        call: The call that takes them together with the map.
        value: A map of the same size.
        run: Computes cells from a call, its function and its arguments.
        done: Results for tensors that have been laid before.
    """

    call: Call
    value: Value
    run: Run
    done: dict[tuple[Mapless, tuple[Dim, ...]], Any] = field(default_factory=dict)

    def of(self, source: Mapless, dims: tuple[Dim, ...]) -> Any:
        """Return a tensor as coordinates, or as the result of an operator on coordinates.

        Args:
            dims: Atoms that its dimensions run over, perhaps with more dimensions in front.
        """
        if (source, dims) not in self.done:
            self.done[source, dims] = self._laid(source, dims)
        return self.done[source, dims]

    def _laid(self, source: Mapless, dims: tuple[Dim, ...]) -> Any:
        place_dims = set(PLACES) & set(dims)
        if not place_dims:
            return constant_of("a tensor", source.tensor.double())
        if len(place_dims) < len(PLACES):
            raise self._uneven
        tensor = source.tensor.double()[(None,) * (len(dims) - source.tensor.dim())]
        maps = tensor.movedim([dims.index(dim) for dim in PLACES], (0, -2, -1))
        maps = maps.reshape(maps.shape[0], -1, *maps.shape[-2:])
        layer, is_round = _coordinates(maps, self.value.channels)
        if layer is None or not is_round:
            try:
                return self._of_arguments(source, dims)
            except TilenetError:
                if layer is None:
                    raise
        laid = Value(layer.out_channels, self.value.size, layer=layer, inputs=(self.value,))
        return from_map(cells_of(self.call.entered(laid)), dims)

    def _of_arguments(self, source: Mapless, dims: tuple[Dim, ...]) -> Any:
        """The result of the tensor's operator for arguments that are laid."""

        def laid(argument: Any) -> Any:
            if isinstance(argument, list):
                return [laid(part) for part in argument]
            if not isinstance(argument, Mapless):
                return argument
            return self.of(argument, _traced(source, argument, dims))

        try:
            kwargs = {name: laid(part) for name, part in source.kwargs.items()}
            result = self.run(source.call, source.function, laid(source.args), kwargs)
            result = result if source.number is None else result[source.number]
        except Exception as error:  # the operator does not take such numbers
            raise self._uneven from error
        if not isinstance(result, Cells):
            raise self._uneven
        return result

    @property
    def _uneven(self) -> Refusal:
        why = "numbers that differ by cells are made in forward in uneven steps"
        return self.call.refused(why)


def _traced(result: Mapless, argument: Mapless, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the atoms of an argument's dimensions, from the result's dimensions that change."""

    def over(place: int) -> Dim:
        n = argument.tensor.shape[place]
        along = torch.linspace(0.1, 0.9, n, dtype=torch.float64)
        numbers = along.expand(
            *argument.tensor.shape[:place], *argument.tensor.shape[place + 1 :], n
        )
        changed = result.recompute(argument, numbers.movedim(-1, place).contiguous())
        changing = [
            dim
            for axis, dim in enumerate(dims, changed.dim() - len(dims))
            if axis >= 0 and dim in PLACES and bool((changed != changed.narrow(axis, 0, 1)).any())
        ]
        if len(changing) > 1:
            raise ValueError(f"a dimension of {n} runs over {changing}")
        return changing[0] if changing else (n,) * (n > 1)

    return tuple(map(over, range(argument.tensor.dim())))


def _coordinates(maps: Tensor, channels: int) -> tuple[Coordinates | None, bool]:
    """The layer of numbers (B, C, H, W), and whether its own are round; None: steps are uneven.

    Numbers are the same for each image; H or W may be 1.
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
    parts = (_in_unit(unit, start, steps, (rows, cols)) for unit in units)
    layers = [Coordinates(channels, wide, *part) for part in parts]
    return next(((layer, True) for layer in layers if _is_round(layer)), (layers[0], False))


def _in_unit(
    unit: Any, start: Tensor, steps: Tensor, size: tuple[int, int]
) -> tuple[tuple[float, ...], Any, float]:
    """Numbers of a layer in a unit, the unit, and the epsilon of its divisor."""
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
