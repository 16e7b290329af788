"""Stashed maps: skips by name, as torchgpipe's pipeline moves them between partitions.

Outside of a pipeline the same modules work through torchgpipe's default tracker of the thread.
"""

from collections.abc import Callable, Generator
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilenet.geometry.layers import Expand, Join, Stash
from tilenet.model.gpipe import pop, skippable, stash
from tilenet.model.resample import AxisPlace, resampled


class StashMap(nn.Module):
    """Hands on its input and keeps it, or only its height and width, under a name."""

    def __init__(self, name: str, *, sizes: bool) -> None:
        super().__init__()
        self.name, self.sizes = name, sizes

    def forward(self, x: Tensor) -> Generator[Any, None, Tensor]:
        # No channels: a map of no bytes that knows its size wherever it travels. Not `len`, which
        # torch's exporter would keep as a number.
        yield stash(self.name, x.new_empty(x.shape[0], 0, *x.shape[2:]) if self.sizes else x)
        return x


class JoinMaps(nn.Module):
    """Joins its input with stashed maps, (B, C, H, W), as `geometry.layers.Join` says."""

    def __init__(self, layer: Join) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Generator[Any, Tensor, Tensor]:
        maps: list[Tensor] = []
        for name in self.layer.kept:
            stashed = yield pop(name)
            maps.append(stashed)
        return joined(self.layer, x, maps)


def joined(layer: Join, x: Tensor, maps: list[Tensor]) -> Tensor:
    """A map joined with stashed ones, in the order of their names."""
    match layer.how:
        case "take":
            out: Tensor = _Take.apply(maps[0], x)  # type: ignore[no-untyped-call]
            return out
        case "concatenate":
            return _concatenated(layer, x, maps)
    ordered = [*maps[: layer.place], x, *maps[layer.place :]]
    return reduce(torch.add if layer.how == "add" else torch.mul, ordered)


def _concatenated(layer: Join, x: Tensor, maps: list[Tensor]) -> Tensor:
    if layer.fit == "crop":
        maps = [_cropped(map_, x) for map_ in maps]
    else:
        rows, cols = maps[0].shape[2] - x.shape[2], maps[0].shape[3] - x.shape[3]
        x = F.pad(x, (0, cols, 0, rows)) if rows or cols else x
    return torch.cat([*maps[: layer.place], x, *maps[layer.place :]], dim=1)


class _Take(torch.autograd.Function):
    """A map in another's place, which backward passes through with no gradient.

    torchgpipe attaches the maps for other partitions to the map that is left here.
    """

    @staticmethod
    def forward(ctx: Any, stashed: Tensor, _: Tensor) -> Tensor:
        return stashed.view_as(stashed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _cropped(x: Tensor, to: Tensor) -> Tensor:
    """Cut evenly on both sides to another map's size."""
    top, left = (x.shape[2] - to.shape[2]) // 2, (x.shape[3] - to.shape[3]) // 2
    return x[:, :, top : top + to.shape[2], left : left + to.shape[3]]


Place = Callable[[int], tuple[tuple[int, int], tuple[int, int]]]


class ExpandMap(nn.Module):
    """Enlarges a whole map (B, C, bins, bins) to the size that was stashed under a name.

    Args:
        place: Row and column of the enlarged map at which a sample's part begins, by its number,
            and the whole map's size; None: the part is the whole map.
    """

    def __init__(self, layer: Expand, place: Place | None = None) -> None:
        super().__init__()
        self.layer, self.place = layer, place

    def forward(self, x: Tensor) -> Generator[Any, Tensor, Tensor]:
        like = yield pop(self.layer.name)
        # The sum of nothing: torchgpipe waits for the gradient of each map that it hands on.
        x = x + like.sum()
        size = like.shape[2], like.shape[3]
        if self.place is None:
            return self._enlarged(x, size, (0, 0), size)
        parts = [self._enlarged(sample[None], size, *self.place(n)) for n, sample in enumerate(x)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _enlarged(
        self, x: Tensor, size: tuple[int, int], first: tuple[int, int], whole: tuple[int, int]
    ) -> Tensor:
        rows = AxisPlace(0, x.shape[2], first[0], size[0], whole[0])
        cols = AxisPlace(0, x.shape[3], first[1], size[1], whole[1])
        return resampled(x, rows, cols, self.layer.mode, corners=self.layer.corners)


# Functions instead of decorators: names are those of the network's maps, and mypy does not follow
# decorators that change a class (mypy#3135).
def stash_layer(layer: Stash) -> nn.Module:
    """Build a stash; the layer that takes its name receives its map."""
    module: nn.Module = skippable(stash=[layer.name])(StashMap)(layer.name, sizes=layer.sizes)
    return module


def join_layer(layer: Join) -> nn.Module:
    """A join that receives the stashed maps of its names."""
    module: nn.Module = skippable(pop=layer.names)(JoinMaps)(layer)
    return module


def expand_layer(layer: Expand, place: Place | None = None) -> nn.Module:
    """An enlargement to the size that is stashed under its name, or its part at `place`."""
    module: nn.Module = skippable(pop=layer.names)(ExpandMap)(layer, place)
    return module
