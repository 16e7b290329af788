"""What each layer of a network costs in bytes, layer by layer on fake tensors.

Each distinct layer (kind, channels, input size, dtype) is measured once. What is noted suffices to
put the peak of any consecutive layers together (`planning.block_walk`): what stays for backward,
and how far above what lives already forward and backward go.

Norms count as the plain modules that `build_layer` makes; whole-image statistics add messages of a
few bytes a channel. Autocast is the CPU's, whose lists differ from CUDA's for a few layers.
"""

import os
from dataclasses import replace
from typing import Literal

import torch

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Activation, Conv, Layer, Pool, Pop, Stash, Upsample
from tilenet.geometry.shapes import map_shapes
from tilenet.geometry.shares import takes_copy
from tilenet.planning.one_layer import Case, LayerBytes, measure, parameter_dtype

__all__ = [
    "LARGEST_MAP",
    "LayerBytes",
    "check_map_sizes",
    "check_weight_bytes",
    "largest_map",
    "layer_bytes",
]

HaloMode = Literal["overlap", "exchange"]
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
            work on a copy of their input with a rim, but for large maps' convolutions. There rims,
            a few rows of cells, are not counted.
    """
    shapes = map_shapes(layers, height, width)
    dtype = parameter_dtype(precision)
    stashed: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    found = []
    viewed = False
    for index, (layer, before) in enumerate(zip(layers, shapes, strict=False)):
        skip = stashed[layer.name] if isinstance(layer, Pop) else None
        shape = (batch, before.channels, before.rows, before.cols)
        if isinstance(layer, Stash):
            stashed[layer.name] = (shape, dtype)
        # The name of a skip costs nothing; without it, levels alike are measured once.
        plain = replace(layer, name="") if isinstance(layer, Stash | Pop) else layer
        rim = _rim(layer, batch * before.rows * before.cols) if halo_mode == "exchange" else 0
        case = Case(plain, shape, dtype, skip, precision, rim, wants_gradient=index > 0)
        if isinstance(layer, Activation):
            cost, dtype, _ = measure(replace(case, viewed=viewed))
            # Not in place where it begins a partition (see parallel.pipeline.Partition).
            cost = replace(cost, first=measure(replace(case, in_place=False))[0])
        else:
            cost, dtype, viewed = measure(case)
            if index == 0:
                # torchgpipe ties each micro-batch to the one before, and with that the image wants
                # a gradient after all.
                cost = replace(cost, first=measure(replace(case, wants_gradient=True))[0])
        found.append(replace(cost, layer=layer))
    return tuple(found)


def largest_map(
    layers: tuple[Layer, ...], height: int, width: int, batch: int = 1
) -> tuple[int, int]:
    """Number of the layer whose output has the most elements, and how many.

    The input counts as the output of the first layer where it is the largest.
    """
    elements = [shape.num_elements * batch for shape in map_shapes(layers, height, width)]
    largest = max(range(len(elements)), key=elements.__getitem__)
    return max(0, largest - 1), elements[largest]


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
            f"{width} px); use smaller tiles"
            + (", or fewer samples per micro-batch" if batch > 1 else "")
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


def _rim(layer: Layer, cells: int) -> int:
    """Cells around its input, of so many cells, that a layer works on a copy with."""
    if isinstance(layer, Conv):
        return layer.reach // 2 if takes_copy(layer, cells) else 0
    if isinstance(layer, Pool):
        return max(layer.padding, layer.kernel - layer.stride, 0)
    return int(isinstance(layer, Upsample) and layer.mode == "bilinear")
