"""What composes with what: layers that need more than their tile need it at that layer.

Tiles that run one after another, or micro-batches of a pipeline, cannot wait for one another at a
layer. So statistics over a whole image need all its tiles in flight at once (DESIGN.md, section 7).
"""

from tilenet.geometry.halo import norm_context
from tilenet.geometry.layers import Layer, Norm

__all__ = ["obstacle"]


def obstacle(
    layers: tuple[Layer, ...], grid: tuple[int, int], mesh: tuple[int, int, int]
) -> str | None:
    """Why a network's norms cannot be trained exactly on these tiles; None where they can.

    Args:
        grid: Tiles of an image along rows and columns.
        mesh: Replicas, rows and columns of ranks.
    """
    if norm_context(layers) != "image":
        return None
    norm = next(layer.norm for layer in layers if isinstance(layer, Norm))
    if norm == "batch":
        return (
            "batch norm over all images of a step is not built yet (network.norm: batch, "
            "network.norm_scope: image); set network.norm_scope: tile (approximate: the map then "
            "depends on the tiles), network.norm: instance or group with one tile per image, or "
            "network.norm: none"
        )
    if grid == (1, 1):
        return None
    replicas, rows, columns = mesh
    return (
        f"{norm} norm over the whole image needs each image or crop in one tile until statistics "
        f"travel between ranks (network.norm_scope: image, tiles: {grid[0]} × {grid[1]}, mesh: "
        f"{replicas} × {rows} × {columns}); give each rank whole images with mesh.replicas: "
        f"{replicas * rows * columns}, tiles.rows: 1 and tiles.columns: 1, or set "
        "network.norm_scope: tile (approximate) or network.norm: none"
    )
