"""Form micro-batches from a rank's tiles, and choose how many are in the pipeline at once."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from tilenet.geometry.layers import Layer
from tilenet.planning.compatibility import whole_image

T = TypeVar("T")


def stacks(layers: tuple[Layer, ...], work: Sequence[T], images: Sequence[int]) -> list[list[T]]:
    """Group a rank's tiles into micro-batches, since a layer may need several tiles at once.

    Args:
        work: The rank's tiles of a step.
        images: The image of each.
    """
    whole = whole_image(layers)
    if whole is None:
        return [[tile] for tile in work]
    if whole == "batch norm":
        return [list(work)] if work else []
    by_image: dict[int, list[T]] = {}
    for tile, image in zip(work, images, strict=True):
        by_image.setdefault(image, []).append(tile)
    return list(by_image.values())


def most_stacked(layers: tuple[Layer, ...], tiles: int, images: int) -> int:
    """Most tiles that form a micro-batch, as `stacks` has it.

    Args:
        tiles: A rank's, of an image.
        images: Images of a step on a replica.
    """
    whole = whole_image(layers)
    return tiles * images if whole == "batch norm" else tiles if whole else 1


def most_micro_batches(layers: tuple[Layer, ...], tiles: int, images: int) -> int:
    """Most micro-batches that a rank has in a step; arguments as of `most_stacked`."""
    return tiles * images // most_stacked(layers, tiles, images)


def mini_batch_sizes(num_tiles: int, micro_batches: int) -> tuple[int, ...]:
    """Tiles of each mini-batch: at most `micro_batches` in the pipeline at once.

    As even as possible, since the pipeline fills and drains once per mini-batch: 7 tiles with 6
    micro-batches run as 3 and 4, not as 6 and 1.
    """
    count = -(-num_tiles // micro_batches)
    edges = [num_tiles * part // count for part in range(count + 1)] if count else [0]
    return tuple(stop - start for start, stop in pairwise(edges))
