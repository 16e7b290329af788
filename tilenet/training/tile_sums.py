"""What is measured of tiles, summed: of a rank's tiles together, one by one, or strip by strip."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from tilenet.geometry.tiles import owned
from tilenet.geometry.windows import Window
from tilenet.model.skips import Origin
from tilenet.model.upload import upload
from tilenet.parallel.exchange.swept_training import SweptPipe
from tilenet.training.images.work import ReadTile
from tilenet.training.swept import AnyPipe

__all__ = ["tile_sums"]


def tile_sums(
    pipe: AnyPipe,
    batch: Sequence[Sequence[ReadTile]],
    offset_px: int,
    of_window: Callable[[ReadTile, Tensor, Window], Tensor],
) -> Iterator[tuple[ReadTile, Tensor]]:
    """For each tile of a mini-batch the sum of what is measured on the pixels that it owns.

    Collective where layers of the pipe are.

    Args:
        offset_px: Pixel of what a tile reads on which its map begins.
        of_window: What the logits (1, K, h, w) of a window that a tile owns add, differentiable:
            of all that it owns, or strip by strip, and then in backward once more.
    """
    origins = [
        Origin(
            images=tuple(part.work.sample.number for part in parts),
            tiling=parts[0].work.tiling,
            tiles=tuple(part.work.number for part in parts),
            micro_batch=number,
        )
        for number, parts in enumerate(batch)
    ]
    if isinstance(pipe, SweptPipe):
        for (part,), origin in zip(batch, origins, strict=True):
            yield part, pipe(part.image, origin, partial(of_window, part))
        return
    images = [
        torch.cat([upload(one.image, pipe.devices[0]) for one in parts])
        if len(parts) > 1
        else parts[0].image
        for parts in batch
    ]
    outputs = pipe(images, origins) if batch else []
    for parts in batch:
        # Taken off the list, so that a micro-batch's logits go as soon as its loss is taken.
        stacked = outputs.pop(0)
        for place, part in enumerate(parts):
            logits = owned(stacked[place : place + 1], part.work.tile, offset_px)
            yield part, of_window(part, logits, part.work.tile.own)
