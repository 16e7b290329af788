"""Sums over a rank's tiles, which are computed together, one by one, or strip by strip."""

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
    """Compute a mini-batch; yield each tile with its sums over the pixels that it owns.

    Collective where layers of the pipe are.

    Args:
        offset_px: Offset of a tile's map from the window that it reads.
        of_window: Returns the differentiable sums over a window, from its logits (1, K, h, w). It
            is called for all that a tile owns, or for each strip, then once more in backward.
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
        torch.cat([upload(part.image, pipe.devices[0]) for part in parts])
        if len(parts) > 1
        else parts[0].image
        for parts in batch
    ]
    outputs = pipe(images, origins) if batch else []
    for parts in batch:
        # Popped, so that a micro-batch's logits are freed as soon as its loss is computed.
        stacked = outputs.pop(0)
        for place, part in enumerate(parts):
            logits = owned(stacked[place : place + 1], part.work.tile, offset_px)
            yield part, of_window(part, logits, part.work.tile.own)
