"""Maps and weights that are too large for any device: limits of torch and of the host."""

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Layer
from tilenet.geometry.maps import map_shapes
from tilenet.parallel.health.node_memory import node_memory_bytes

LARGEST_MAP = 2**31


def largest_map(
    layers: tuple[Layer, ...], height: int, width: int, batch: int = 1
) -> tuple[int, int]:
    """Return the number of the layer with the most output elements, and the number of these.

    The input counts as the output of the first layer where it is the largest.
    """
    elements = [shape.num_elements * batch for shape in map_shapes(layers, height, width)]
    largest = max(range(len(elements)), key=elements.__getitem__)
    return max(0, largest - 1), elements[largest]


def countable(layers: tuple[Layer, ...], height: int, width: int, batch: int = 1) -> bool:
    """Whether torch's kernels can index all maps; many of them count with 32 bits."""
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
    """Refuse networks with more weights, in float32, than this machine's memory holds.

    Raises:
        TilenetError: They are more; the error names both sizes.
    """
    host_bytes = node_memory_bytes()
    needed = 4 * sum(layer.num_parameters for layer in layers)
    if needed > host_bytes:
        raise TilenetError(
            f"a rank holds all weights of the network (weights alone: {needed / 2**30:.1f} GiB, "
            f"memory: {host_bytes / 2**30:.1f} GiB); lower network.base or network.kernel"
        )
