"""Memory of a rank in a training step, for `tilenet check --ranks`."""

from tilenet.choices import HaloMode
from tilenet.geometry.halo_rule import halo_rule
from tilenet.geometry.layers import Layer
from tilenet.geometry.ownership import check_shares
from tilenet.geometry.tiles import Cut, cut
from tilenet.planning.explain import in_gib
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.map_limits import check_map_sizes
from tilenet.planning.memory.partition import PartitionBytes, partition_bytes
from tilenet.planning.mesh import choose_mesh


def rank_memory(
    layers: tuple[Layer, ...], image: tuple[int, int], num_ranks: int, mode: HaloMode
) -> PartitionBytes:
    """Predict the bytes of the rank with the largest tile of an image, in float32, under adamw.

    Args:
        image: Rows and columns of the image that the ranks share, in pixels.

    Raises:
        TilenetError: There are more ranks than tiles, or a map is too large for a device.
    """
    exchanged, mesh = mode == "exchange", choose_mesh(num_ranks, 1)
    rule = halo_rule("exact", layers, exchanged=exchanged)
    tiling = cut(*image, Cut(grid=(mesh.rows, mesh.columns)), rule)
    sides = tiling.rows, tiling.cols
    if exchanged:
        for name, spans in zip(("rows", "columns"), sides, strict=True):
            check_shares(layers, spans, name)
    height, width = (max(s.own if exchanged else s.read for s in spans) for spans in sides)
    check_map_sizes(layers, height, width)
    costs = layer_bytes(layers, height, width, halo_mode=mode)
    return partition_bytes(costs, (len(layers),), 1, "never")[0]


def memory_line(mode: HaloMode, part: PartitionBytes) -> str:
    """The bytes in words."""
    fixed = part.parameters + part.gradients, part.optimizer
    weights, optimizer = map(in_gib, fixed)
    maps = in_gib(part.total - sum(fixed))
    return (
        f"memory of a rank       {mode}: {in_gib(part.total)} GiB (feature maps {maps}, weights "
        f"and gradients {weights}, adamw {optimizer})"
    )
