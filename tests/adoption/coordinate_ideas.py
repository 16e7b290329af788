"""Modules of one idea each about coordinates, and the words by which some are refused."""

import torch
import torch.nn.functional as F
from one_idea import Case, around
from torch import Tensor, nn

__all__ = ["COORDINATES"]


def evenly(x: Tensor, first: float, last: float, dim: int) -> Tensor:
    return torch.linspace(first, last, x.shape[dim], dtype=x.dtype)


def grid_of(x: Tensor) -> list[Tensor]:
    """Rows and columns from -1 to 1, (B, 1, H, W) each, as CoordConv adds them."""
    grids = torch.meshgrid(evenly(x, -1, 1, 2), evenly(x, -1, 1, 3), indexing="ij")
    return [one.expand(len(x), 1, -1, -1) for one in grids]


def counted_by_products(x: Tensor) -> Tensor:
    """Columns from -1 to 1, by integers."""
    h, w = x.shape[2:]
    ones = torch.ones([1, 1, h, 1], dtype=torch.int32)
    cells = torch.arange(w, dtype=torch.int32)[None, None, None, :]
    return torch.matmul(ones, cells).to(x.dtype) / (w - 1) * 2 - 1


def padded(m: nn.Module, x: Tensor) -> Tensor:
    """Coordinates of a map that has a column and a row more."""
    y = F.pad(x, [0, 1, 0, 1])
    out: Tensor = m.one(y + evenly(y, 0, 1, 3))
    return out


def in_the_last_dimension(x: Tensor) -> Tensor:
    return (x.permute(0, 2, 3, 1) * evenly(x, -1, 1, 3)[:, None]).permute(0, 3, 1, 2)


def positions(m: nn.Module, x: Tensor) -> Tensor:
    """Sines and cosines of rows and columns, as DETR and EdgeNeXt encode positions."""
    b, c, h, w = x.shape
    cells = torch.ones((b, h, w), dtype=torch.bool)
    rows, cols = (cells.cumsum(dim, dtype=x.dtype) for dim in (1, 2))
    both = rows / (rows[:, -1:] + 1e-6), cols / (cols[:, :, -1:] + 1e-6)
    powers = 100 ** (2 * (torch.arange(c, dtype=x.dtype) // 2) / c)
    angles = [(one * 2 * torch.pi)[..., None] / powers for one in both]
    waves = [
        torch.stack([one[..., ::2].sin(), one[..., 1::2].cos()], 4).flatten(3) for one in angles
    ]
    out: Tensor = x + m.one(torch.cat(waves, 3).permute(0, 3, 1, 2))
    return out


NOT_KNOWN = "made in forward of no map"
COORDINATES: dict[str, Case] = {
    "coordinates": around(lambda m, x: torch.cat([*grid_of(x), x], 1)),
    "coordinates of whole numbers": around(
        lambda m, x: torch.cat([x, counted_by_products(x).repeat(len(x), 1, 1, 1)], 1)
    ),
    "coordinates in the last dimension but one": around(lambda m, x: in_the_last_dimension(x)),
    "rows and columns in one": around(
        lambda m, x: x + evenly(x, 2, 1, 3) - evenly(x, 0, 4, 2)[:, None]
    ),
    "coordinates that are convolved": around(
        lambda m, x: x + m.one(torch.cat(grid_of(x), 1)), one=nn.Conv2d(2, 4, 3, padding=1)
    ),
    "coordinates under a pad": around(padded, one=nn.Conv2d(4, 2, 2)),
    "middles of columns": around(
        lambda m, x: x * (2 * (torch.arange(x.shape[3], dtype=x.dtype) + 0.5) / x.shape[3] - 1)
    ),
    "edges of rows": around(
        lambda m, x: x * (torch.arange(x.shape[2], dtype=x.dtype) / x.shape[2])[:, None]
    ),
    "counted columns": around(lambda m, x: (x + torch.arange(x.shape[3])).sin()),
    "numbers of channels": around(lambda m, x: x * torch.arange(4).view(-1, 1, 1)),
    "distances from the middle": around(
        lambda m, x: x * torch.stack(grid_of(x)).pow(2).sum(0).sqrt()
    ),
    "sines of positions": around(positions, one=nn.Conv2d(8, 4, 1)),
    "counted in shares, with an epsilon": around(
        lambda m, x: x + (torch.arange(x.shape[3], dtype=x.dtype) + 1) / (x.shape[3] + 1e-6)
    ),
    "middles with an epsilon": around(
        lambda m, x: x * ((torch.arange(x.shape[3], dtype=x.dtype) + 0.5) / (x.shape[3] + 1e-6))
    ),
    "the largest coordinate": around(lambda m, x: x + torch.stack(grid_of(x)).max(0).values),
    "sines of flat positions": around(
        lambda m, x: x + torch.linspace(0, 1, x[0, 0].numel()).sin().view(1, 1, *x.shape[2:]),
        "uneven steps",
    ),
    "sines of columns alone": around(
        lambda m, x: x + torch.arange(x.shape[3]).sin(), "uneven steps"
    ),
    "steps that grow": around(
        lambda m, x: x + torch.logspace(0, 1, x.shape[3]).expand_as(x), "uneven steps"
    ),
    "coordinates in units of their own": around(
        lambda m, x: x + 0.37 * torch.arange(x.shape[2])[:, None], "must be its list"
    ),
    "coordinates of flat cells": around(
        lambda m, x: (x.flatten(2) * torch.linspace(0, 1, x[0, 0].numel())).view_as(x), NOT_KNOWN
    ),
    "every other column": around(lambda m, x: x * (torch.arange(x.shape[3]) % 2), "uneven steps"),
    "the first columns": around(
        lambda m, x: x.masked_fill(torch.arange(x.shape[3]) > 9, 0.0), NOT_KNOWN
    ),
    "coordinates by image": around(
        lambda m, x: x * torch.arange(len(x))[:, None, None, None], "must be its list|uneven"
    ),
    "columns of 16 bits": around(
        lambda m, x: x * torch.arange(x.shape[3], dtype=torch.bfloat16), "few bits"
    ),
    "rows of bytes": around(
        lambda m, x: x * torch.arange(x.shape[2], dtype=torch.uint8)[:, None], "few bits"
    ),
    "a number of the pixels": around(
        lambda m, x: x - x.data.mean().item(), "a number is taken out"
    ),
    "random columns": around(lambda m, x: x * torch.rand(x.shape[3]), NOT_KNOWN),
    "columns without numbers": around(lambda m, x: x * torch.empty(x.shape[3]), NOT_KNOWN),
}
