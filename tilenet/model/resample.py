"""Enlarge a window of a map as the whole map would be enlarged.

torch's `interpolate` takes its input for the whole map: with `align_corners` each place depends on
the sizes of both maps, and so does each place of a map that was averaged to a few cells.
Here places are computed from the whole maps' sizes, for any window of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AxisPlace:
    """The places of a window and its enlargement along an axis, in cells of the whole maps.

    Attributes:
        first: First cell of the window.
        whole: Cells of the whole map.
        out_first: First cell of the enlarged window.
        out_count: Cells of the enlarged window.
        out_whole: Cells of the whole enlarged map.
    """

    first: int
    whole: int
    out_first: int
    out_count: int
    out_whole: int


def resampled(x: Tensor, rows: AxisPlace, cols: AxisPlace, mode: str, *, corners: bool) -> Tensor:
    """Return a window of the enlarged map, (B, C, rows.out_count, cols.out_count).

    Cells outside of the window (B, C, H, W) are taken to be its outermost ones, as torch has it at
    the map's edges; inside of the map the window has to reach far enough.

    Args:
        mode: `nearest` or `bilinear`.
        corners: Whether the middles of outermost cells lie on one another (bilinear alone).
    """
    for dim, place in ((3, cols), (2, rows)):  # in the order of torch
        x = _along(x, dim, place, mode, corners=corners)
    return x


def _along(x: Tensor, dim: int, place: AxisPlace, mode: str, *, corners: bool) -> Tensor:
    cells = torch.arange(place.out_count, device=x.device, dtype=torch.float64) + place.out_first
    if mode == "nearest":
        # As torch rounds it, which at some sizes is not the cell that is nearest.
        share = torch.tensor(place.whole, dtype=torch.float32) / place.out_whole
        at = (cells.float() * share).floor().clamp(max=place.whole - 1)
        return x.index_select(dim, _inside(at, x.shape[dim], place))
    if corners:
        at = cells * ((place.whole - 1) / max(place.out_whole - 1, 1))
    else:
        at = ((cells + 0.5) * (place.whole / place.out_whole) - 0.5).clamp(min=0)
    low = at.floor()
    high = (low + 1).clamp(max=place.whole - 1)
    shape = [-1 if d == dim else 1 for d in range(4)]
    share = (at - low).to(x.dtype if x.is_floating_point() else torch.float32).view(shape)
    below = x.index_select(dim, _inside(low, x.shape[dim], place))
    above = x.index_select(dim, _inside(high, x.shape[dim], place))
    # As torch has it, of infinite cells too.
    return (below * (1 - share)).add_(above * share)


def _inside(cells: Tensor, size: int, place: AxisPlace) -> Tensor:
    """Cells of the whole map, counted in the window."""
    return (cells - place.first).clamp(0, size - 1).long()
