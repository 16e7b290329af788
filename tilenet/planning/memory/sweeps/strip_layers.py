"""Memory of a layer on a strip's rows, scaled from its measured cost."""

from tilenet.geometry.by_place import by_corners
from tilenet.geometry.layers import Conv, Layer, Pool, TransposedConv, Upsample
from tilenet.geometry.maps import MapShape
from tilenet.geometry.sweep import Rows
from tilenet.planning.memory.layer_cost import LayerBytes

WEIGHT_BYTES = 4  # least bytes of a weight, and of a value of the image or the loss


def cast_bytes(layer: Layer, cost: LayerBytes, item_bytes: int) -> int:
    """Bytes of the narrow copy of a layer's weights that autocast makes for each strip."""
    is_cast = item_bytes < WEIGHT_BYTES and isinstance(layer, Conv | TransposedConv)
    return is_cast * cost.parameters * item_bytes // WEIGHT_BYTES


def forward_bytes(layer: Layer, cost: LayerBytes, size: int) -> int:
    """Bytes that a layer's forward takes, including its output of `size` bytes."""
    # As `resampled` does: lower cells, upper cells, their difference, its share and the sum.
    if isinstance(layer, Upsample) and by_corners(layer):
        return 4 * size + size // layer.factor
    if isinstance(layer, Pool) and by_corners(layer):  # along rows, while there are all columns
        return 4 * size * layer.stride
    return int(cost.forward * size / cost.output)


def copied_cols(layer: Conv | Pool, shape: MapShape, out: int, need: Rows) -> int:
    """Return the columns of a layer's padded copy of its input; 0: its operator pads itself.

    Args:
        shape: Shape of the input map.
        out: Columns of the output.
        need: First and past-the-end row of the input that the strip needs.
    """
    if isinstance(layer, Conv):
        layer, is_square = layer.along_cols, layer.is_square
        if is_square and layer.kernel == layer.stride == 1 and not layer.padding:
            return 0
    low, high = layer.needs(0, out - 1)
    left, right = max(-low, 0), max(high + 1 - shape.cols, 0)
    present = min(high + 1, shape.cols) - max(low, 0)
    padded = (present + 2 * layer.padding - layer.reach - 1) // layer.stride + 1
    if left == layer.padding >= right and padded == out:
        left = right = 0
    inside = need[0] >= 0 and need[1] <= shape.rows and present == shape.cols
    return 0 if inside and not (left or right) else left + present + right
