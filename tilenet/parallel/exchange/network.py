"""A network with layers that exchange data between ranks, built from a plain network."""

from collections.abc import Sequence
from functools import partial

from torch import nn

from tilenet.choices import HaloMode
from tilenet.geometry.by_place import by_place
from tilenet.geometry.layers import Layer, Norm
from tilenet.model.network import Network
from tilenet.mpi import Intracomm
from tilenet.parallel.exchange.layers import SpatialContext, spatial_layer
from tilenet.parallel.exchange.norm import WholeImageNorm
from tilenet.parallel.exchange.placed import cells_at, placed_layer


class SpatialNetwork(Network):
    """A network over the ranks of an image; its parameters keep their names.

    Attributes:
        spatial: Grids, shares and communicators of its layers.
    """

    def __init__(self, modules: list[nn.Module], network: Network, spatial: SpatialContext) -> None:
        super().__init__(modules, network.mask_key)
        self.spatial = spatial

    def close(self) -> None:
        """Give the communicators back. Collective."""
        self.spatial.close()


def placed_network(network: Network, layers: tuple[Layer, ...], balance: Sequence[int]) -> Network:
    """The same network in evaluation mode, for tiles that are computed one after another.

    Its layers need nothing of other tiles, but some must know where on the image their tile lies.

    Args:
        layers: All layers of the whole network, even where `network` holds only the first ones.
    """
    if not any(by_place(layer) for layer in layers):
        return network
    spatial = SpatialContext(layers, balance, None, None)
    modules = []
    for index, (layer, module) in enumerate(zip(layers, network, strict=False)):
        placed = placed_layer(layer, index, module, spatial) if by_place(layer) else None
        modules.append(placed or module)
    return Network(modules, network.mask_key).eval()


def spatial_network(
    network: Network,
    layers: tuple[Layer, ...],
    balance: Sequence[int],
    halo_mode: HaloMode,
    image_comm: Intracomm | None,
    step_comm: Intracomm | None = None,
    *,
    device_mpi: bool = False,
) -> SpatialNetwork:
    """Replace layers by ones that exchange data between ranks where needed. Collective.

    Args:
        network: The plain network; its parameters are shared, its other modules taken over.
        layers: Layers that `network` was built from.
        balance: Layers per partition.
        halo_mode: With `exchange` all layers get the cells around own ones from the neighbours;
            with `overlap` only norms over the whole image sum over ranks.
        image_comm: The ranks that hold the same image, row by row of the grid.
        step_comm: All ranks, over which batch norm sums.
        device_mpi: Whether MPI takes device memory.

    Raises:
        TilenetError: A layer cannot be cut.
    """
    spatial = SpatialContext(layers, balance, image_comm, step_comm, device_mpi=device_mpi)
    modules = []
    for index, (layer, module) in enumerate(zip(layers, network, strict=True)):
        if isinstance(layer, Norm):
            if layer.scope == "image" and (layer.norm == "batch" or not spatial.grids[index].whole):
                cells = partial(cells_at, spatial, index)
                comm = spatial.norm_comm(index, layer.norm)
                module = WholeImageNorm(module, layer, cells, comm)
        elif placed := placed_layer(layer, index, module, spatial):
            module = placed
        elif halo_mode == "exchange" and not spatial.grids[index].whole:
            module = spatial_layer(layer, index, module, spatial)
        modules.append(module)
    return SpatialNetwork(modules, network, spatial)
