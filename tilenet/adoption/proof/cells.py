"""Run cellwise layers to check that they look at no other cell, and to find weights that learn."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from tilenet.adoption.values import name_of
from tilenet.errors import TilenetError
from tilenet.geometry.layers import Cellwise, Conv, Layer
from tilenet.model.cellwise import CellwiseModule, hold_weights, kernel_of

ROUNDING = 1e-9  # of float64
SIZE = 3, 5


def prove_cells(layers: tuple[Layer, ...]) -> None:
    """Compare the results of cellwise layers for cells in another order, and for a single cell.

    Raises:
        TilenetError: A layer looks beyond a cell.
    """
    for layer in {replace(layer, kept=()): None for layer in layers if isinstance(layer, Cellwise)}:
        if len(layer.single) <= len(layer.channels):  # else all have one cell
            _prove(layer)


def without_idle_weights(layers: tuple[Layer, ...], names: Mapping[str, str]) -> tuple[Layer, ...]:
    """The layers, where weights that no gradient reaches are not trained, as torch leaves them.

    Such weights are compared only, or used without their gradient.

    Args:
        names: Name in the module of each weight of the layers; a weight that also learns in
            another layer is trained in both.
    """
    own = {
        (number, weight): name_of(number, layer, weight)
        for number, layer in enumerate(layers)
        if isinstance(layer, Cellwise | Conv)
        for weight in _idle(replace(layer, kept=()) if isinstance(layer, Cellwise) else layer)
    }
    learns = {names[name] for name in names.keys() - set(own.values())}
    idle = {place for place, name in own.items() if names[name] not in learns}
    return tuple(
        replace(
            layer,
            weights=tuple(
                (name, shape, trained and (number, name) not in idle)
                for name, shape, trained in layer.weights
            ),
        )
        if isinstance(layer, Cellwise | Conv)
        else layer
        for number, layer in enumerate(layers)
    )


@lru_cache(maxsize=1024)
def _idle(layer: Cellwise | Conv) -> tuple[str, ...]:
    """Names of weights that no gradient reaches."""
    if not layer.weights:
        return ()
    module: nn.Module
    if isinstance(layer, Conv):
        module = nn.Module()
        hold_weights(module, layer)
        _fill(module)
        y = kernel_of(layer, module, torch.zeros(()))
    else:
        module, maps = _random(layer)
        y = _computed(module, maps, torch.arange(SIZE[0] * SIZE[1]), SIZE)
    if y.requires_grad:
        y.sum().backward()  # type: ignore[no-untyped-call]
    return tuple(name for name, parameter in module.named_parameters() if parameter.grad is None)


def _random(layer: Cellwise) -> tuple[CellwiseModule, list[Tensor]]:
    """The layer with random weights, and maps (B, C, cells)."""
    module = CellwiseModule(layer).double()
    generator = _fill(module)
    channels = list(layer.channels)
    channels.insert(layer.place, layer.in_channels)
    maps = [
        torch.randn((2, wide, 1 if number in layer.single else SIZE[0] * SIZE[1]),
                    generator=generator, dtype=torch.float64)
        for number, wide in enumerate(channels)
    ]  # fmt: skip
    return module, maps


def _fill(module: nn.Module) -> torch.Generator:
    """Draw random weights; return the generator."""
    generator = torch.Generator().manual_seed(0)
    for weight in (*module.parameters(), *module.buffers()):
        weight.data = torch.rand(weight.shape, generator=generator, dtype=weight.dtype)
    return generator


def _prove(layer: Cellwise) -> None:
    module, maps = _random(layer)
    order = torch.randperm(SIZE[0] * SIZE[1], generator=torch.Generator().manual_seed(1))
    every = torch.arange(len(order))
    with torch.no_grad():
        whole = _computed(module, maps, every, SIZE)
        moved = _computed(module, maps, order, SIZE[::-1])
        alone = _computed(module, maps, order[:1], (1, 1))
    parts = (order, moved), (order[:1], alone)
    # Numbers that have no logarithm or root are NaN in both.
    close = [torch.isclose(whole[..., n], y, ROUNDING, ROUNDING, equal_nan=True) for n, y in parts]
    if not all(bool(same.all()) for same in close):
        names = ", ".join(str(step[0]) for step in layer.steps)
        raise TilenetError(
            f"a cell is made of the same cell of each map ({names}: the cells around it change "
            "it); report it, please"
        )


def _computed(
    module: CellwiseModule, maps: list[Tensor], cells: Tensor, size: tuple[int, int]
) -> Tensor:
    """The layer's result (B, C, cells) for these cells, laid out as a map of a size."""
    layer = module.layer
    parts = [
        x[..., None] if number in layer.single else x[..., cells].reshape(*x.shape[:2], *size)
        for number, x in enumerate(maps)
    ]
    x = parts.pop(layer.place)
    return module.compute(x, parts).flatten(2)
