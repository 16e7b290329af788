"""A network whose layers reach over ranks, made of one that never heard of them."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from tilenet.geometry.by_place import by_place
from tilenet.geometry.layers import Layer, Norm
from tilenet.model.choices import HaloMode
from tilenet.model.network import Network
from tilenet.parallel.exchange.layers import Surroundings, spatial_layer
from tilenet.parallel.exchange.norm import WholeImageNorm
from tilenet.parallel.exchange.placed import cells_at, placed_layer

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["SpatialNetwork", "placed_network", "spatial_network"]


class SpatialNetwork(Network):
    """A network over the ranks of an image; its parameters keep their names.

    Attributes:
        around: What its layers know of other ranks.
    """

    def __init__(self, modules: list[nn.Module], network: Network, around: Surroundings) -> None:
        super().__init__(modules, network.mask_key)
        self.around = around

    def close(self) -> None:
        """Give the communicators back. Collective."""
        self.around.close()


def placed_network(network: Network, layers: tuple[Layer, ...], balance: Sequence[int]) -> Network:
    """The same network in evaluation mode, for tiles that are computed one after another.

    Its layers need nothing of other tiles, but some must know where on the image their tile lies.

    Args:
        layers: All that it was built of, also where it is only the first of them.
    """
    if not any(by_place(layer) for layer in layers):
        return network
    around = Surroundings(layers, balance, None, None)
    modules = []
    for index, (layer, module) in enumerate(zip(layers, network, strict=False)):
        placed = placed_layer(layer, index, module, around) if by_place(layer) else None
        modules.append(placed or module)
    return Network(modules, network.mask_key).eval()


def spatial_network(
    network: Network,
    layers: tuple[Layer, ...],
    balance: Sequence[int],
    halo_mode: HaloMode,
    image_comm: "MPI.Intracomm | None",
    step_comm: "MPI.Intracomm | None" = None,
    *,
    device_mpi: bool = False,
) -> SpatialNetwork:
    """The same network with layers that reach over ranks where they must. Collective.

    Args:
        network: Its parameters are shared, its other modules taken over.
        layers: Layers that it was built of.
        balance: Layers per partition.
        halo_mode: With `exchange` all layers get what they look at from the neighbours; with
            `overlap` only norms over the whole image sum over ranks.
        image_comm: The ranks that hold the same image, row by row of the grid.
        step_comm: All ranks, over which batch norm sums.
        device_mpi: Whether MPI takes device memory.

    Raises:
        TilenetError: A layer cannot be cut.
    """
    around = Surroundings(layers, balance, image_comm, step_comm, device_mpi=device_mpi)
    modules = []
    for index, (layer, module) in enumerate(zip(layers, network, strict=True)):
        if isinstance(layer, Norm):
            if layer.scope == "image" and (layer.norm == "batch" or not around.grids[index].whole):
                cells = partial(cells_at, around, index)
                comm = around.norm_comm(index, layer.norm)
                module = WholeImageNorm(module, layer, cells, comm)
        elif placed := placed_layer(layer, index, module, around):
            module = placed
        elif halo_mode == "exchange" and not around.grids[index].whole:
            module = spatial_layer(layer, index, module, around)
        modules.append(module)
    return SpatialNetwork(modules, network, around)
