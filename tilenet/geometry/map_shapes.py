"""Sizes of the feature maps between a network's layers."""

from dataclasses import dataclass

from tilenet.geometry.layers import (
    Layer,
    walk,
)

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
    start = MapShape(layers[0].in_channels, height, width)

    def through(layer: Layer, before: MapShape, kept: tuple[MapShape, ...]) -> MapShape:
        rows = layer.size(before.rows, *(one.rows for one in kept))
        cols = layer.size(before.cols, *(one.cols for one in kept))
        return MapShape(layer.out_channels, rows, cols)

    return tuple(walk(layers, start, through))
