"""What each layer of a network costs in bytes, layer by layer on fake tensors.

Each distinct layer (kind, channels, input size, dtype) is measured once. What is noted suffices to
put the peak of any consecutive layers together (`partition.py`): what stays for backward,
and how far above what lives already forward and backward go.

Norms count as the plain modules that `build_layer` makes; whole-image statistics add messages of a
few bytes a channel. Autocast is the CPU's, whose lists differ from CUDA's for a few layers.
"""

import os
from dataclasses import replace

import torch

from tilenet.errors import TilenetError
from tilenet.geometry.layers import (
    Cellwise,
    Conv,
    Expand,
    Join,
    Layer,
    Pool,
    Stash,
    Upsample,
)
from tilenet.geometry.maps import map_shapes
from tilenet.geometry.ownership import takes_copy
from tilenet.model.choices import HaloMode, parameter_dtype
from tilenet.model.in_place import in_place
from tilenet.planning.memory.measure import Case, LayerBytes, measure

__all__ = ["check_map_sizes", "check_weight_bytes", "countable", "largest_map", "layer_bytes"]


LARGEST_MAP = 2**31


def layer_bytes(
    layers: tuple[Layer, ...],
    height: int,
    width: int,
    precision: str = "float32",
    batch: int = 1,
    halo_mode: HaloMode = "overlap",
) -> tuple[LayerBytes, ...]:
    """Bytes of each layer for a micro-batch (batch, bands, height, width).

    Maps may have any size here; `check_map_sizes` says which ones can be computed.

    Args:
        precision: `float32`, `float64`, `bfloat16` or `float16` (autocast, float32 parameters).
        halo_mode: With `exchange` the size is a rank's own, and layers that look around themselves
            work on a copy of their input with a halo, but for large maps' convolutions. There
            halos, a few rows of cells, are not counted.
    """
    shapes = map_shapes(layers, height, width)
    dtype = parameter_dtype(precision)
    stashed: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    found = []
    viewed = False
    for index, (layer, before) in enumerate(zip(layers, shapes, strict=False)):
        kept = tuple(stashed.pop(name) for name in layer.names)
        shape = (batch, before.channels, before.rows, before.cols)
        if isinstance(layer, Stash):
            channels = 0 if layer.sizes else before.channels
            stashed[layer.name] = ((batch, channels, *shape[2:]), dtype)
        halo = 0, 0
        if halo_mode == "exchange":
            halo = _halo(layer, batch * before.rows * before.cols)
        case = Case(
            _nameless(layer), shape, dtype, kept, precision, halo, wants_gradient=index > 0,
            in_place=in_place(layers, index),
        )  # fmt: skip
        if case.in_place:
            cost, dtype, _ = measure(replace(case, viewed=viewed))
            # Not in place where it begins a partition (see parallel.pipeline.pipe.Partition).
            cost = replace(cost, first=measure(replace(case, in_place=False))[0])
        else:
            cost, dtype, viewed = measure(case)
            if index == 0:
                # torchgpipe ties each micro-batch to the one before, and with that the image wants
                # a gradient after all.
                cost = replace(cost, first=measure(replace(case, wants_gradient=True))[0])
        found.append(replace(cost, layer=layer))
    return tuple(found)


def _nameless(layer: Layer) -> Layer:
    """Names of kept maps cost nothing; without them, levels alike are measured once."""
    match layer:
        case Stash() | Expand():
            return replace(layer, name="0")
        case Join() | Cellwise():
            return replace(layer, kept=tuple(str(place) for place in range(len(layer.kept))))
    return layer


def largest_map(
    layers: tuple[Layer, ...], height: int, width: int, batch: int = 1
) -> tuple[int, int]:
    """Number of the layer whose output has the most elements, and how many.

    The input counts as the output of the first layer where it is the largest.
    """
    elements = [shape.num_elements * batch for shape in map_shapes(layers, height, width)]
    largest = max(range(len(elements)), key=elements.__getitem__)
    return max(0, largest - 1), elements[largest]


def countable(layers: tuple[Layer, ...], height: int, width: int, batch: int = 1) -> bool:
    """Whether torch's kernels, many of which count with 32 bits, can index all maps."""
    return largest_map(layers, height, width, batch)[1] < LARGEST_MAP


def check_map_sizes(layers: tuple[Layer, ...], height: int, width: int, batch: int = 1) -> None:
    """Refuse maps that many of torch's kernels cannot index.

    Raises:
        TilenetError: A map has 2³¹ elements or more.
    """
    index, elements = largest_map(layers, height, width, batch)
    if elements >= LARGEST_MAP:
        raise TilenetError(
            f"a feature map must have fewer than 2³¹ elements, which kernels count with 32 bits "
            f"(layer {index}, {layers[index].kind}: {elements} elements for {batch} × {height} × "
            f"{width} px); use "
            + (
                "smaller tiles"
                if batch == 1
                else "more ranks, or fewer or smaller images in a step"
            )
        )


def check_weight_bytes(layers: tuple[Layer, ...]) -> None:
    """Refuse networks whose weights alone, in float32, are more than this machine's memory.

    Raises:
        TilenetError: With both sizes.
    """
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = 4 * sum(layer.num_parameters for layer in layers)
    if needed > there:
        raise TilenetError(
            f"a rank holds all weights of the network (weights alone: {needed / 2**30:.1f} GiB, "
            f"memory: {there / 2**30:.1f} GiB); lower network.base or network.kernel"
        )


def _halo(layer: Layer, cells: int) -> tuple[int, int]:
    """Cells around its input, of a number of cells, that a layer works on a copy with."""
    if isinstance(layer, Conv):
        copied = takes_copy(layer, cells)
        return (layer.reach // 2, layer.along_cols.reach // 2) if copied else (0, 0)
    if isinstance(layer, Pool):
        around = max(layer.padding, layer.kernel - layer.stride, 0)
    else:
        around = -layer.needs(0, layer.factor - 1)[0] if isinstance(layer, Upsample) else 0
    return around, around
