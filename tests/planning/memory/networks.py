"""Random small networks, and ways to cut them into partitions."""

import random
from itertools import pairwise
from typing import Any

import torch

from tilenet.geometry.unet import UNetOptions


def random_options(draw: random.Random, most_convolutions: int = 3, **fixed: Any) -> UNetOptions:
    """Options of a network of *same* padding, unless `fixed` says otherwise."""
    drawn = {
        "poolings": draw.randint(1, 3),
        "convolutions": draw.randint(1, most_convolutions),
        "base": draw.choice([2, 4, 6]),
        "bands": draw.randint(1, 5),
        "classes": draw.randint(2, 6),
        "upsampling": draw.choice(["nearest", "bilinear", "transposed"]),
        "norm": draw.choice(["none", "instance", "group", "batch"]),
        "norm_scope": "tile",
        "dropout": draw.choice([0, 0.2]),
    }
    return UNetOptions(**(drawn | fixed))


def random_balance(draw: random.Random, count: int, most: int) -> list[int]:
    """Layers of each of 1 to `most` partitions."""
    cuts = sorted(draw.sample(range(1, count), draw.randint(0, most - 1)))
    return [stop - start for start, stop in pairwise([0, *cuts, count])]


class Head(torch.autograd.Function):
    """A loss that keeps nothing; its gradient is made in backward."""

    @staticmethod
    def forward(ctx, y):  # type: ignore[no-untyped-def]
        ctx.shape, ctx.dtype, ctx.device = y.shape, y.dtype, y.device
        return y.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        return torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)
