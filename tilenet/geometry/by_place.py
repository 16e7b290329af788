"""Layers that must know the place of their part on the whole map."""

from tilenet.geometry.coordinates import Coordinates
from tilenet.geometry.layers import Dropout, Expand, Layer, Pool, Upsample


def by_corners(layer: Layer) -> bool:
    """Whether it makes a map larger or smaller with `align_corners`."""
    match layer:
        case Upsample(mode="bilinear", corners=True) | Pool(mode="corners"):
            return True
    return False


def by_place(layer: Layer) -> bool:
    """Whether it must know its place: coordinates, masks of cells, enlarged averages too."""
    match layer:
        case Expand() | Dropout(drops="cells") | Coordinates():
            return True
    return by_corners(layer)
