"""Operators that drop cells, channels and samples, and the random numbers of drop path."""

from dataclasses import replace
from typing import Any

from tilenet.adoption.calls import OTHER_NOISE, Call, Noise, operator
from tilenet.adoption.cells import BATCH, IMAGES, Cells, cells_of
from tilenet.adoption.cellwise import from_map, to_map
from tilenet.adoption.values import Value
from tilenet.geometry.layers import Cellwise, Dropout


def drop_path(call: Call, x: Any, noise: Noise) -> Any:
    """A map times masks; where it is not divided by the probability yet, the noise with it."""
    cells = call.cells(x)
    value = call.map_of(to_map(cells))
    if noise.stage != "mask" or not 0 < noise.keep <= 1:
        raise call.refused(OTHER_NOISE)
    if not noise.scaled and noise.keep != 1:
        # x was divided by the probability before.
        divided = (("div.Tensor", ("value", 0), noise.keep),)
        if not isinstance(value.layer, Cellwise) or value.layer.steps != divided:
            return replace(noise, thinned=cells, source=object())
        value = value.inputs[0]
    return _dropped(call, value, cells, 1 - noise.keep, "samples")


def _dropped(call: Call, value: Value, cells: Cells, share: float, drops: Any) -> Cells:
    layer = Dropout(value.channels, value.channels, share, drops)
    dropped = replace(value, layer=layer, inputs=(value,), weights={}, like=None)
    return from_map(cells_of(call.entered(dropped)), cells.dims)


@operator("rand", "empty", "new_empty")
def _noise(call: Call, x: Any, size: Any = None, dtype: Any = None) -> Any:
    if len(call.sizes) == 4 and call.sizes[1] == 0:  # a map without channels, for a cat
        return Cells(((BATCH,), (0,), ("H",), ("W",)), (call.sizes[2], call.sizes[3]))
    if call.sizes == (IMAGES, *[1] * (len(call.sizes) - 1)):
        return Noise("uniform" if call.operator == "rand" else "empty")
    raise call.refused(OTHER_NOISE)


@operator("bernoulli")
def _bernoulli(call: Call, x: Any, p: float) -> Noise:
    if not isinstance(x, Noise):
        raise call.refused(OTHER_NOISE)
    return replace(x, stage="mask", keep=float(p), scaled=False)


@operator("floor")
def _floor(call: Call, x: Any) -> Any:
    if not isinstance(x, Noise):
        return NotImplemented
    if x.stage != "shifted":
        raise call.refused(OTHER_NOISE)
    return replace(x, stage="mask")


@operator("dropout", "feature_dropout")
def _dropout(call: Call, x: Any, p: float, train: bool) -> Any:
    cells = call.cells(x)
    if not train or not p:
        return cells
    if p == 1:
        raise call.refused("everything is dropped")
    rows = cells.dims[:2] == ((), (BATCH,))  # Dropout3d takes a map's images for channels
    if call.operator == "dropout" or rows:
        drops = "samples" if call.operator != "dropout" else "cells"
        return _dropped(call, call.map_of(to_map(cells)), cells, float(p), drops)
    return _dropped(call, call.map_of(cells), cells, float(p), "channels")
