"""Predict the bytes that a network needs."""

from tilenet.geometry.layers import Layer, Pop, Stash
from tilenet.geometry.shapes import map_shapes

__all__ = ["inference_bytes"]


def inference_bytes(layers: tuple[Layer, ...], height: int, width: int, item_bytes: int) -> int:
    """Most bytes of feature maps that live at one time while one image runs forward.

    Counted are a layer's input and output, and the stashed maps; not the convolution's workspace.
    """
    shapes = map_shapes(layers, height, width)
    stashed: dict[str, int] = {}
    most = 0
    for layer, before, after in zip(layers, shapes, shapes[1:], strict=False):
        padded = 0
        if isinstance(layer, Stash):
            stashed[layer.name] = after.num_elements
        elif isinstance(layer, Pop) and (before.rows, before.cols) != (after.rows, after.cols):
            padded = after.rows * after.cols * layer.in_channels
        most = max(most, before.num_elements + padded + after.num_elements + sum(stashed.values()))
        if isinstance(layer, Pop):
            del stashed[layer.name]
    return most * item_bytes
