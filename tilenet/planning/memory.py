"""Predict the bytes that a network needs."""

from tilenet.geometry.layers import Layer, Pop, Stash

__all__ = ["inference_bytes"]


def inference_bytes(layers: tuple[Layer, ...], height: int, width: int, item_bytes: int) -> int:
    """Most bytes of feature maps that live at one time while one image runs forward.

    Counted are a layer's input and output, and the stashed maps; not the convolution's workspace.
    """
    rows, cols, channels = height, width, layers[0].in_channels
    stashed: dict[str, int] = {}
    sizes: dict[str, tuple[int, int]] = {}
    most = 0
    for layer in layers:
        before = rows * cols * channels
        rows, cols, channels = layer.size(rows), layer.size(cols), layer.out_channels
        padded = 0
        if isinstance(layer, Stash):
            stashed[layer.name], sizes[layer.name] = rows * cols * channels, (rows, cols)
        elif isinstance(layer, Pop) and layer.fit == "pad" and (rows, cols) != sizes[layer.name]:
            rows, cols = sizes[layer.name]
            padded = rows * cols * layer.in_channels
        most = max(most, before + padded + rows * cols * channels + sum(stashed.values()))
        if isinstance(layer, Pop):
            del stashed[layer.name]
    return most * item_bytes
