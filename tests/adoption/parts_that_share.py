"""Parts of generated modules in which layers share weights."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from draw import Draw
from parts import KEEP, WIDE, Part, conv, rule
from torch import Tensor, nn

__all__ = ["SHARED"]


SHARED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "twice": lambda m, x: m.one(F.relu(m.one(x))),
    "alias": lambda m, x: m.again[0](m.one(x)),
    "siblings": lambda m, x: m.one(x) + m.one(torch.tanh(x)),
    "bent lines": lambda m, x: m.bent(m.one(m.bent(x))),
    "there and back": lambda m, x: F.conv_transpose2d(m.one(x), m.one.weight, padding=1),
    "norm": lambda m, x: m.norm(m.one(F.silu(m.norm(x)))),
    "groups": lambda m, x: m.groups(m.one(m.groups(x))) * m.groups.weight[:, None, None],
    "low and high": lambda m, x: m.one(x) * m.one(F.adaptive_avg_pool2d(x, 1)).sigmoid(),
}


@rule(KEEP, "shared part")
def _shared(draw: Draw) -> nn.Module:
    one, groups = conv(3), nn.GroupNorm(2, WIDE)
    groups.bias = groups.weight
    form = SHARED[draw.of("form", *SHARED)]
    again, bent = nn.Sequential(one), nn.PReLU(WIDE, 0.3)
    return Part(form, one=one, again=again, bent=bent, norm=nn.BatchNorm2d(WIDE), groups=groups)
