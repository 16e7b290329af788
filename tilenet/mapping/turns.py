"""Test-time augmentation: the mean over turned images, each mapped as a whole and turned back.

Networks with poolings look from where their grid begins. So a turned image has its own, which
begins at its own first pixel, as in training (`geometry.symmetries`), and its own statistics.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from tilenet.data.rasters.raster import Pixels
from tilenet.geometry.symmetries import Symmetry, symmetries
from tilenet.geometry.tiles import Tile, turned_tiling
from tilenet.geometry.windows import Window, overlap
from tilenet.mapping.mapper import Computed, Input, Mapper
from tilenet.parallel.exchange.passes import KeptSums, Values
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.planning.maps.question import MapPlan

Turned = Literal["flips", "all"]


class TurnedMapper(Mapper):
    """Computes the own pixels of an image's tiles in the turned image."""

    def __init__(self, like: Mapper, symmetry: Symmetry) -> None:
        tiling = turned_tiling(like.tiling, symmetry)
        super().__init__("logits", like.record, like.image, tiling, like.dtype)
        self.symmetry = symmetry

    def input(self, window: Window) -> Input:
        pixels = self.image.read(self.symmetry.source(window, *self.image.size))
        turn = self.symmetry.turn
        return self.standardised(Pixels(turn(pixels.values), turn(pixels.valid)))

    def turned(self, tile: Tile) -> Tile:
        """Return the place of an image's tile in the turned image, without parts beyond edges."""
        inside = overlap(tile.own, self.image.whole)
        assert inside is not None, "own windows begin inside the image"
        own = self.symmetry.back.source(inside, self.tiling.height, self.tiling.width)
        return Tile(self.tiling.tiles[self.tiling.number(own)].read, own)

    def read(self, tile: Tile) -> Window:
        """Return the window of the turned image that is read for a tile of the image."""
        return self.turned(tile).read

    def turned_back(self, computed: Computed) -> Computed:
        back = self.symmetry.back
        logits = computed.logits.mT if back.transposed else computed.logits
        flips = [dim for dim, flip in ((-2, back.flips_rows), (-1, back.flips_cols)) if flip]
        return Computed(logits.flip(flips), back.turn(computed.valid))


@dataclass(frozen=True)
class Turn:
    """One of the turned images.

    Attributes:
        plan: Plan of the passes for its statistics.
        mapper: Mapper that reads it.
    """

    plan: MapPlan
    mapper: TurnedMapper


def turns_of(turned: Turned | None) -> tuple[Symmetry, ...]:
    """Return the symmetries of the images that are averaged; empty: the image alone."""
    return () if turned is None else symmetries(flips=True, rotations=turned == "all")


def turn_map(plan: MapPlan, mapper: Mapper, turned: Turned | None) -> tuple[Turn, ...]:
    """The turned images of a map that is made tile by tile."""
    across = Symmetry(transposed=True)
    passes = tuple((layer, turned_tiling(tiling, across)) for layer, tiling in plan.passes)
    transposed_plan = replace(plan, tiling=turned_tiling(plan.tiling, across), passes=passes)
    return tuple(
        Turn(transposed_plan if symmetry.transposed else plan, TurnedMapper(mapper, symmetry))
        for symmetry in turns_of(turned)
    )


@dataclass(frozen=True)
class SumsOfTurn:
    """Sums of passes over one of the turned images, kept with those of the others."""

    kept_sums: KeptSums
    first: int  # number that its first layer has there

    def sums(self, layer: int) -> tuple[int, Values | None]:
        return self.kept_sums.sums(self.first + layer)

    def sums_done(self, layer: int, tiles: int, values: Values) -> None:
        self.kept_sums.sums_done(self.first + layer, tiles, values)

    def round_done(self) -> None:
        self.kept_sums.round_done()


@contextmanager
def mean_of_turns(
    turns: Sequence[Turn], pipes: Sequence[Pipe], mine: Sequence[Tile]
) -> Iterator[Callable[[Sequence[Tile]], list[Computed]]]:
    """Yield a function that computes tiles in all turned images; threads read ahead.

    Args:
        pipes: The network of each turned image.
        mine: Tiles of the image that this rank will compute, in order.

    Yields:
        Tiles to their own pixels: means of scores. Beyond the image's edges there is no data.
    """

    def mean(tile: Tile) -> Computed:
        total: Tensor | None = None
        for turn, pipe, reads in zip(turns, pipes, inputs, strict=True):
            (turned,) = turn.mapper.tiles(pipe, [turn.mapper.turned(tile)], islice(reads, 1))
            computed = turn.mapper.turned_back(turned)
            scores = turn.mapper.scores(computed.logits)
            total = scores if total is None else total + scores
        assert total is not None
        # As large as the piece that the map waits for.
        down, right = tile.own.height - total.shape[1], tile.own.width - total.shape[2]
        valid = np.pad(computed.valid, ((0, down), (0, right)))
        return Computed(F.pad(total / len(turns), (0, right, 0, down)), valid)

    with ExitStack() as stack:
        inputs = [
            stack.enter_context(turn.mapper.inputs(map(turn.mapper.read, mine))) for turn in turns
        ]
        yield lambda tiles: [mean(tile) for tile in tiles]
