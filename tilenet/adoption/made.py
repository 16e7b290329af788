"""Tensors that a forward pass makes of no map: numbers that are the same for all, or coordinates.

They are computed as they are recorded, in float64, until they meet a map. There they must be even
steps along its rows and columns. How these depend on the map's size is what makes them round
numbers; that it is so at other sizes too, the proof says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilenet.adoption.calls import Call, Refusal
from tilenet.adoption.cells import BATCH, COLS, ROWS, Cells, cells_of, constant_of, maps_in
from tilenet.adoption.cellwise import from_map
from tilenet.adoption.proof.as_defined import wide_numbers
from tilenet.adoption.values import Value
from tilenet.geometry.coordinates import Coordinates

__all__ = ["Made", "laid_on", "made"]

ROUNDING = 1e-9
TENTHS = 10  # numbers that people write are whole numbers of them


@dataclass(frozen=True, eq=False)
class Made:
    """A tensor that is computed of numbers alone, as it is at the size that is recorded."""

    tensor: Tensor


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
    return [Made(one) for one in result] if isinstance(result, list | tuple) else Made(result)


def refusal(call: Call) -> Refusal:
    return call.refused("a tensor is made in forward of no map")


def _wide(argument: Any) -> Any:
    """Arguments in float64, which stands for the map's own precision."""
    if isinstance(argument, list):
        return [_wide(one) for one in argument]
    if isinstance(argument, Made):
        return argument.tensor
    return torch.float64 if argument is torch.float32 else argument


def laid_on(call: Call, argument: Any, tensors: Sequence[Cells]) -> Any:
    """An argument in which tensors that are made are laid on what the operator takes as well."""
    if isinstance(argument, list):
        return [laid_on(call, one, tensors) for one in argument]
    if not isinstance(argument, Made):
        return argument
    tensor = argument.tensor
    like = next((one for one in tensors if one.size), None)
    if like is None and tensor.dim() == 4:  # under a kernel
        maps = (one for one in call.maps if one.size == tensor.shape[2:] and not one.whole)
        like = next(map(cells_of, maps), None)
    if like is None or tensor.dtype == torch.bool:
        raise refusal(call)
    return _laid(call, tensor.double(), like)


def _laid(call: Call, tensor: Tensor, like: Cells) -> Any:
    """A tensor whose dimensions are laid on those of a map, the last on the last."""
    there = {dim: place - len(like.dims) for place, dim in enumerate(like.dims)}
    axes = [there.get((one,), 0) for one in (BATCH, ROWS, COLS)]
    sizes = [tensor.shape[axis] if -axis <= tensor.dim() else 1 for axis in axes]
    if all(size == 1 for size in sizes):
        return constant_of("a tensor", tensor)
    value = next((one for one in maps_in(like) if one.size == like.size and not one.whole), None)
    if value is None or 0 in axes or tensor.dim() > len(like.dims):
        raise refusal(call)
    tensor = tensor.reshape(*[1] * (len(like.dims) - tensor.dim()), *tensor.shape)
    dims = tuple(
        dim if like.over_cells(place) else (tensor.shape[place],) * (tensor.shape[place] > 1)
        for place, dim in enumerate(like.dims)
    )
    maps = tensor.movedim(axes, (0, -2, -1)).reshape(sizes[0], -1, *sizes[1:])
    layer = _coordinates(call, maps, value.channels)
    laid = Value(layer.out_channels, value.size, layer=layer, inputs=(value,))
    return from_map(cells_of(call.entered(laid)), dims)


def _coordinates(call: Call, maps: Tensor, channels: int) -> Coordinates:
    """The layer of numbers (B, C, H, W), which are the same for each image; H or W may be 1."""
    _, wide, rows, cols = maps.shape
    start = maps[0, :, 0, 0]
    down, right = (
        (maps[0, :, at[0], at[1]] - start) / max(cells - 1, 1)
        for at, cells in (((-1, 0), rows), ((0, -1), cols))
    )
    steps = torch.stack([start, down, right], 1)
    i, j = (torch.arange(cells, dtype=torch.float64) for cells in (rows, cols))
    even = steps @ torch.stack(
        [torch.ones(rows, cols), *torch.meshgrid(i, j, indexing="ij")]
    ).double().flatten(1)
    if not (even.view(wide, rows, cols) - maps).abs().max() <= ROUNDING * maps.abs().max():
        raise call.refused("numbers that differ by cells are made in forward in uneven steps")
    found = {
        "ends": (start, down * (rows - 1), right * (cols - 1)),
        "middles": (start - (down + right) / 2, down * rows, right * cols),
        "edges": (start, down * rows, right * cols),
        "cells": (start, down, right),
    }
    if set((down.abs() + right.abs()).tolist()) <= {0.0, 1.0}:
        found = {"cells": found["cells"]}
    units = (name for name, numbers in found.items() if _is_round(torch.stack(numbers, 1)))
    unit: Any = next(units, next(iter(found)))
    numbers = torch.stack(found[unit], 1).flatten().tolist()
    return Coordinates(channels, wide, tuple(numbers), unit)


def _is_round(numbers: Tensor) -> bool:
    tenths = numbers * TENTHS
    return bool(((tenths - tenths.round()).abs() <= ROUNDING).all())
