"""Cellwise layers look at no other cell: the same in any order of cells, and of one alone."""

from dataclasses import replace

import torch
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Cellwise, Layer
from tilenet.model.cellwise import CellwiseModule

__all__ = ["prove_cells"]

ROUNDING = 1e-9  # of float64
SIZE = 3, 5


def prove_cells(layers: tuple[Layer, ...]) -> None:
    """Compare what cellwise layers make of cells in another order, and of one of them.

    Raises:
        TilenetError: A layer looks beyond a cell.
    """
    for layer in {replace(one, kept=()): None for one in layers if isinstance(one, Cellwise)}:
        if len(layer.single) <= len(layer.channels):  # else all have one cell
            _prove(layer)


def _prove(layer: Cellwise) -> None:
    generator = torch.Generator().manual_seed(0)
    module = CellwiseModule(layer).double()
    for weight in (*module.parameters(), *module.buffers()):
        weight.data = torch.rand(weight.shape, generator=generator, dtype=weight.dtype)
    channels = list(layer.channels)
    channels.insert(layer.place, layer.in_channels)
    maps = [
        torch.randn((2, wide, 1 if number in layer.single else SIZE[0] * SIZE[1]),
                    generator=generator, dtype=torch.float64)
        for number, wide in enumerate(channels)
    ]  # fmt: skip
    order = torch.randperm(SIZE[0] * SIZE[1], generator=generator)
    every = torch.arange(len(order))
    with torch.no_grad():
        whole = _computed(module, maps, every, SIZE)
        moved = _computed(module, maps, order, SIZE[::-1])
        alone = _computed(module, maps, order[:1], (1, 1))
    parts = (order, moved), (order[:1], alone)
    # Numbers that have no logarithm or root are NaN in both.
    close = [torch.isclose(whole[..., n], y, ROUNDING, ROUNDING, equal_nan=True) for n, y in parts]
    if not all(bool(one.all()) for one in close):
        names = ", ".join(str(step[0]) for step in layer.steps)
        raise TilenetError(
            f"a cell is made of the same cell of each map ({names}: the cells around it change "
            "it); report it, please"
        )


def _computed(
    module: CellwiseModule, maps: list[Tensor], cells: Tensor, size: tuple[int, int]
) -> Tensor:
    """What the layer makes of these cells, (B, C, cells), as a map of a size."""
    layer = module.layer
    parts = [
        x[..., None] if number in layer.single else x[..., cells].reshape(*x.shape[:2], *size)
        for number, x in enumerate(maps)
    ]
    x = parts.pop(layer.place)
    return module.compute(x, parts).flatten(2)
