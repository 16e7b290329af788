"""Modules of one idea each that write over maps, and the words by which some are refused.

The writes change nothing on the images of the proof: they limit at values far beyond.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from one_idea import Case, around
from torch import Tensor

__all__ = ["WRITES"]

View = Callable[[Tensor], Tensor]
FAR = 1e4
OVER_A_PART = "forward writes over a part of a map"

VIEWS: dict[str, View] = {
    "channels": lambda y: y[:, :2],
    "rows": lambda y: y[:, :, 0:],
    "one channel": lambda y: y.select(1, 0),
    "cells in one dimension": lambda y: y.flatten(2),
    "channels last": lambda y: y.permute(0, 2, 3, 1),
    "a transposed part": lambda y: y[:, 1:3].transpose(1, 2),
    "data": lambda y: y.data,
    "a chunk without gradient": lambda y: y.detach().chunk(2, 1)[0],
    "dropout that drops nothing": lambda y: F.dropout(y, 0.0),
    "a view of that": lambda y: F.dropout(y, 0.0)[:, :2],
}


def written(view: View) -> Case:
    def forward(_: object, x: Tensor) -> Tensor:
        y = x * 2
        view(y).clamp_(-FAR, FAR)
        return y

    return around(forward, OVER_A_PART)


def out(_: object, x: Tensor) -> Tensor:
    y = (x * 2).detach()
    torch.clamp(y, -FAR, FAR, out=y)
    return x + y


def view_of_before(_: object, x: Tensor) -> Tensor:
    y = x * 2
    part = y[:, :2]
    y.clamp_(-FAR, FAR)
    return torch.cat([part, y], 1)


def view_of_a_part(_: object, x: Tensor) -> Tensor:
    y = x * 2
    y[:, :2].clamp_(-FAR, FAR)
    return torch.cat([y[:, 1:3], x], 1)


def view_added(_: object, x: Tensor) -> Tensor:
    y = x * 2
    view = y.detach()
    y.clamp_(-FAR, FAR)
    return y.add_(view)


def part_added(_: object, x: Tensor) -> Tensor:
    y = x * 2
    first, same = y[:, :2], y[:, :2]
    first.clamp_(-FAR, FAR)
    first.add_(same)
    return first


def read_for_nothing(_: object, x: Tensor) -> Tensor:
    y = x * 2
    part = y[:, :2]
    part.mul_(3)
    y.relu().mean()
    return part + torch.zeros_like(y)[:, 2:] + x[:, :1].expand_as(y)[:, :2]


def other_shapes(_: object, x: Tensor) -> Tensor:
    y = x * 2
    flat = y.flatten(2)
    flat.unsqueeze_(0)
    F.dropout(flat, 0.0, inplace=True)
    return y + x


def part_alone(_: object, x: Tensor) -> Tensor:
    part = (x * 2)[:, 1:]
    part.mul_(3).relu_()
    return torch.cat([part, part[:, :1]], 1)


def parts_apart(_: object, x: Tensor) -> Tensor:
    y = x * 2
    first, second = y[:, 0::2], y[:, 1::2]
    first.tanh_()
    return torch.cat([second, first], 1)


def views_after(_: object, x: Tensor) -> Tensor:
    y = x * 2
    z = y.mul_(3)
    return y[:, :2] + z[:, 2:]


def another_part_after(_: object, x: Tensor) -> Tensor:
    y = x * 2
    y[:, :2].tanh_()
    return y[:, 2:].relu()


WRITES: dict[str, Case] = {
    **{f"over {name}": written(view) for name, view in VIEWS.items()},
    "out": around(out, r"writes its result over a map \(out\)"),
    "a view of before": around(view_of_before, OVER_A_PART),
    "a view of a part": around(view_of_a_part, OVER_A_PART),
    "a view that is added": around(view_added, OVER_A_PART),
    "a part that is added": around(part_added, OVER_A_PART),
    "read for nothing": around(read_for_nothing),
    "other shapes": around(other_shapes),
    "a part alone": around(part_alone),
    "parts apart": around(parts_apart),
    "views after": around(views_after),
    "another part after": around(another_part_after),
}
