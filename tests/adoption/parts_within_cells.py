"""Parts of generated modules that work within a cell, by whatever operators."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from draw import Draw
from parts import KEEP, WIDE, Part, conv, rule
from torch import Tensor, nn

__all__ = ["CHANNELS"]


def _radix(m: Any, x: Tensor) -> Tensor:
    """Attention over parts of the channels, as in ResNeSt and SKNet."""
    parts = x.view(len(x), 2, 2, *x.shape[2:])
    average = parts.sum(1).mean((2, 3), keepdim=True)
    weights = m.two(average).repeat(1, 2, 1, 1).view(len(x), 2, 2, 1, 1).softmax(1)
    return torch.cat([x[:, :2], (parts * weights).sum(1)], 1)


CHANNELS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "chunk": lambda m, x: torch.cat([m.two(x.chunk(2, 1)[0]), x.chunk(2, 1)[1]], 1),
    "split": lambda m, x: torch.cat(torch.split(x, 2, 1)[::-1], 1),
    "slice": lambda m, x: torch.cat([x[:, 2:], m.two(x[:, :2])], 1),
    "sum": lambda m, x: x * torch.tanh(x.sum(1, keepdim=True)),
    "mean": lambda m, x: x + x.mean(1, keepdim=True),
    "largest": lambda m, x: x + x.max(1, keepdim=True).values * x.amin(1, keepdim=True).tanh(),
    "softmax": lambda m, x: x.softmax(1),
    "shuffle": lambda m, x: x.view(len(x), 2, 2, *x.shape[2:]).transpose(1, 2).flatten(1, 2),
    "stack": lambda m, x: torch.stack([x, m.two(x[:, :2]).repeat(1, 2, 1, 1)]).sum(0),
    "gates": lambda m, x: torch.cat([F.glu(x, 1), x[:, :2] * x[:, 2:].tanh()], 1),
    "the rest of a gate": lambda m, x: x * (g := m.line(x).sigmoid()) + m.conv(x) * (1 - g),
    "a bent line": lambda m, x: F.prelu(m.conv(x), m.slope),
    "cells in a row": lambda m, x: m.norm(x.flatten(2).mT).mT.reshape(x.shape),
    "channels last": lambda m, x: m.mlp(x.permute(0, 2, 3, 1)).movedim(3, 1) * m.scale + x,
    "groups of norms": lambda m, x: (
        x
        / (x.view(len(x), 2, 2, -1).norm(dim=2) + 1)
        .view(len(x), 2, *x.shape[2:])
        .repeat_interleave(2, 1)
    ),
    "a gate of linear layers": lambda m, x: x * m.mlp(x.mean((2, 3)))[..., None, None].sigmoid(),
    "a gate of neighbours": lambda m, x: (
        x
        * m.along(x.mean((2, 3), keepdim=True).squeeze(-1).mT).mT[..., None].sigmoid().expand_as(x)
    ),
    "radix": _radix,
    "lengths": lambda m, x: (
        x * (g := x.norm(p=2, dim=(2, 3), keepdim=True)) / (g.mean(1, True) + 1)
    ),
    "a sum": lambda m, x: x * (m.conv(x).abs() * 0.01).sum((2, 3), keepdim=True).tanh(),
    "largest of all": lambda m, x: (
        x * m.line(F.adaptive_max_pool2d(m.conv(x), 1) + x.amax((2, 3), keepdim=True)).sigmoid()
    ),
    "shares of all cells": lambda m, x: (
        x + (m.conv(x).flatten(2).softmax(2) @ x.flatten(2).mT).sum(1)[..., None, None].tanh()
    ),
    "channels by channels": lambda m, x: (
        torch.bmm(x.flatten(2), x.flatten(2).mT).tanh().softmax(-1) @ x.flatten(2)
    ).view_as(x),
    "more channels": lambda m, x: x + F.pad(m.two(x[:, 1:3]), [0, 0, 0, 0, 1, 1]),
    "coordinates": lambda m, x: m.conv(
        x
        + torch.linspace(-1, 1, x.shape[2], dtype=x.dtype)[:, None]
        - torch.linspace(0, 2, x.shape[3], dtype=x.dtype)
    ),
    "where": lambda m, x: torch.where(x > m.scale, x, m.conv(x)),
    "bounded": lambda m, x: x.clamp(-0.5, 0.7) - 0.1 * m.conv(x).abs().sqrt(),
}


@rule(KEEP, "channels")
def _channels(draw: Draw) -> nn.Module:
    form = CHANNELS[draw.of("form", *CHANNELS)]
    mlp = nn.Sequential(nn.LayerNorm(WIDE), nn.Linear(WIDE, 3), nn.GELU(), nn.Linear(3, WIDE))
    return Part(
        form,
        two=conv(1, 2, 2),
        conv=conv(1),
        line=conv(1, WIDE, 1),
        norm=nn.LayerNorm(WIDE),
        mlp=mlp,
        along=nn.Conv1d(1, 1, 3, padding=1),
        slope=nn.Parameter(torch.rand(WIDE)),
        scale=nn.Parameter(torch.rand(WIDE, 1, 1)),
    )
