"""Sizes of the feature maps between a network's layers."""

from dataclasses import dataclass

from tilenet.geometry.layers import Layer, Pop, Stash

__all__ = ["MapShape", "map_shapes"]


@dataclass(frozen=True)
class MapShape:
    """A feature map of one sample, (C, H, W)."""

    channels: int
    rows: int
    cols: int

    @property
    def num_elements(self) -> int:
        """Cells times channels."""
        return self.channels * self.rows * self.cols


def map_shapes(layers: tuple[Layer, ...], height: int, width: int) -> tuple[MapShape, ...]:
    """The network's input, then each layer's output: one more than there are layers."""
    shapes = [MapShape(layers[0].in_channels, height, width)]
    stashed: dict[str, MapShape] = {}
    for layer in layers:
        before = shapes[-1]
        rows, cols = layer.size(before.rows), layer.size(before.cols)
        if isinstance(layer, Stash):
            stashed[layer.name] = before
        elif isinstance(layer, Pop) and layer.fit == "pad":
            rows, cols = stashed[layer.name].rows, stashed[layer.name].cols
        shapes.append(MapShape(layer.out_channels, rows, cols))
    return tuple(shapes)
