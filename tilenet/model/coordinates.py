"""Numbers that depend on where cells lie on the whole map."""

import torch
from torch import Tensor, nn

from tilenet.geometry.coordinates import OFFSETS, Coordinates
from tilenet.model.cellwise import Tied
from tilenet.model.skips import Place


class CoordinatesMap(nn.Module):
    """A `geometry.coordinates.Coordinates` in place of a map, (B, C, H, W) in and out.

    Args:
        place: Place of each sample, see `model.skips.ExpandMap`; None: maps are whole.
    """

    def __init__(self, layer: Coordinates, place: Place | None = None) -> None:
        super().__init__()
        self.layer, self.place = layer, place

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2], x.shape[3]
        places = [((0, 0), size) if self.place is None else self.place(n) for n in range(len(x))]
        parts = [self._part(x, *place) for place in places]
        return Tied.apply(torch.stack(parts), x)  # type: ignore[no-untyped-call,no-any-return]

    def _part(self, x: Tensor, first: tuple[int, int], whole: tuple[int, int]) -> Tensor:
        """The numbers of a part of the map, (C, H, W), in the map's precision."""
        numbers = torch.tensor(self.layer.numbers, dtype=torch.float64, device=x.device)
        start, down, right = numbers.view(-1, 3, 1, 1).unbind(1)
        rows, cols = (
            self._along(x, first[axis], x.shape[2 + axis], whole[axis]) for axis in (0, 1)
        )
        return (start + down * rows[:, None] + right * cols).to(x.dtype)

    def _along(self, x: Tensor, first: int, count: int, whole: int) -> Tensor:
        unit = self.layer.unit
        cells = torch.arange(count, dtype=torch.float64, device=x.device) + first + OFFSETS[unit]
        if unit == "cells":
            return cells
        return cells / (max(whole - (unit == "ends"), 1) + self.layer.epsilon)

    def extra_repr(self) -> str:
        return f"{self.layer.numbers}, {self.layer.unit}"
