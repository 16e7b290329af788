"""Bytes of feature maps while an image runs forward."""

from tilenet.geometry.layers import Layer, Stash
from tilenet.geometry.maps import map_shapes


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
            stashed[layer.name] = 0 if layer.sizes else after.num_elements
        elif layer.names and (before.rows, before.cols) != (after.rows, after.cols):
            padded = after.rows * after.cols * layer.in_channels
        most = max(most, before.num_elements + padded + after.num_elements + sum(stashed.values()))
        for name in layer.names:
            del stashed[name]
    return most * item_bytes
