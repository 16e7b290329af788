"""Sums over a rank's tiles, which are computed together, one by one, or strip by strip."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tilenet.geometry.tiles import owned
from tilenet.geometry.windows import Window
from tilenet.model.origin import Origin
from tilenet.model.upload import upload
from tilenet.parallel.exchange.swept_training import SweptPipe
from tilenet.parallel.pipeline.flow import MicroBatch
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.training.images.tile_task import ReadTile
from tilenet.training.swept import AnyPipe

OfWindow = Callable[[ReadTile, Tensor, Window], Tensor]


def tile_sums(
    pipe: AnyPipe,
    batch: Sequence[Sequence[ReadTile]],
    offset_px: int,
    of_window: OfWindow,
) -> Iterator[tuple[ReadTile, Tensor]]:
    """Compute a mini-batch; yield each tile with its sums over the pixels that it owns.

    Collective where layers of the pipe are.

    Args:
        offset_px: Offset of a tile's map from the window that it reads.
        of_window: Returns the differentiable sums over a window, from its logits (1, K, h, w). It
            is called for all that a tile owns, or for each strip, then once more in backward.
    """
    origins = [_origin(parts, number) for number, parts in enumerate(batch)]
    if isinstance(pipe, SweptPipe):
        for (part,), origin in zip(batch, origins, strict=True):
            yield part, pipe(part.image, origin, partial(of_window, part))
        return
    images = [_stack(parts, pipe.devices[0]) for parts in batch]
    outputs = pipe(images, origins) if batch else []
    for parts in batch:
        # Popped, so that a micro-batch's logits are freed as soon as its loss is computed.
        yield from _sums_of(parts, outputs.pop(0), offset_px, of_window)


def add_in_flow(
    pipe: AnyPipe,
    batch: Iterator[Sequence[ReadTile]],
    most: int,
    offset_px: int,
    of_window: OfWindow,
    add: Callable[[Tensor], Tensor],
) -> None:
    """Add the gradients of micro-batches that flow through the partitions (1F1B).

    Args:
        batch: The micro-batches, with labels anywhere; a thread takes them one by one.
        most: Most of them in the pipeline at once.
        of_window: See `tile_sums`; called once.
        add: Function that adds a tile's sums, and returns the tensor that backward begins with.
    """
    assert isinstance(pipe, Pipe), "strips of sweeps flow by themselves"
    under_way: dict[int, Sequence[ReadTile]] = {}

    def feed() -> Iterator[MicroBatch]:
        for number, parts in enumerate(batch):
            under_way[number] = parts
            yield MicroBatch(_stack(parts, pipe.devices[0]), _origin(parts, number), number)

    def measure(number: int, logits: Tensor) -> Tensor:
        parts = [on_device(part, pipe.devices[-1]) for part in under_way.pop(number)]
        tiles = _sums_of(parts, logits, offset_px, of_window)
        return torch.stack([add(sums) for _, sums in tiles]).sum()

    pipe.train_in_flow(feed(), measure, most)


def on_device(part: ReadTile, device: torch.device) -> ReadTile:
    """A tile with its labels on a device."""
    return replace(part, labels=upload(part.labels, device))


def _origin(parts: Sequence[ReadTile], number: int) -> Origin:
    return Origin(
        images=tuple(part.work.sample.number for part in parts),
        tiling=parts[0].work.tiling,
        tiles=tuple(part.work.number for part in parts),
        micro_batch=number,
    )


def _stack(parts: Sequence[ReadTile], device: torch.device) -> Tensor:
    if len(parts) == 1:
        return parts[0].image
    return torch.cat([upload(part.image, device) for part in parts])


def _sums_of(
    parts: Sequence[ReadTile], stacked: Tensor, offset_px: int, of_window: OfWindow
) -> Iterator[tuple[ReadTile, Tensor]]:
    for place, part in enumerate(parts):
        logits = owned(stacked[place : place + 1], part.work.tile, offset_px)
        yield part, of_window(part, logits, part.work.tile.own)
