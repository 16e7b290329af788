"""Parts of generated modules that move cells, and whose kernels are computed."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from draw import Draw
from parts import DOWN, KEEP, UP, WIDE, Part, conv, rule
from torch import Tensor, nn

__all__ = ["KERNELS", "MOVES"]

KERNELS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "twice": lambda m, k: 2 * k,
    "standardised": lambda m, k: F.batch_norm(
        k.reshape(1, WIDE, -1), None, None, m.gain.view(-1), training=True, momentum=0.0
    ).reshape_as(k),
    "less its mean": lambda m, k: (k - k.mean((1, 2, 3), True)) / (k.std() + 1),
    "masked": lambda m, k: k * m.mask,
    "without gradient": lambda m, k: k.detach(),
    "tanh": lambda m, k: torch.tanh(k) * m.gain,
    "of a length": lambda m, k: torch._weight_norm(k, m.gain, 0),
}
MOVES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "maximum of zeros": lambda m, x: F.max_pool2d(F.pad(x, [0, 1, 0, 1]), 2, 1),
    "maximum of zeros above": lambda m, x: F.max_pool2d(F.pad(x, [1, 0, 1, 0]), 2, 1),
    "shifted": lambda m, x: x + F.pad(x, [1, -1, 1, -1]),
    "shifted back": lambda m, x: x * F.pad(x, [-2, 2, -2, 2]).sigmoid(),
    "cropped": lambda m, x: m.conv(F.pad(x, [3] * 4)).tanh()[..., 2:-4, 2:-4],
    "cropped otherwise": lambda m, x: F.pad(x, [2] * 4).exp()[..., 1:-3, 3:-1],
    "zeros for a map": lambda m, x: (
        x + torch.cat([x[:, 1:], x.new_zeros(len(x), 1, *x.shape[2:])], 1)
    ),
    "numbers": lambda m, x: x * x.new_full((WIDE, 1, 1), 0.7),
}


@rule(KEEP, "computed kernel")
def _computed(draw: Draw) -> nn.Module:
    form, stride = KERNELS[draw.of("form", *KERNELS)], 1

    def convolve(m: Any, x: Tensor) -> Tensor:
        return F.conv2d(x, form(m, m.conv.weight), m.conv.bias, stride, padding=1)

    part = Part(convolve, conv=conv(3), gain=nn.Parameter(torch.rand(WIDE, 1, 1, 1) + 0.5))
    part.register_buffer("mask", torch.ones(3, 3).tril(), persistent=draw.of("held", True, False))
    return part


@rule(KEEP, "moved cells")
def _moved(draw: Draw) -> nn.Module:
    return Part(MOVES[draw.of("form", *MOVES)], conv=conv(3))


@rule(DOWN, "every other cell")
def _every_other(draw: Draw) -> nn.Module:
    form = draw.of("form", "slices", "one", "unshuffled", "blocks")

    def parted(m: Any, x: Tensor) -> Any:
        rows, cols = x.shape[2] // 2, x.shape[3] // 2
        match form:
            case "one":
                return m.one(x[..., 1::2, ::2])
            case "slices":
                x = torch.cat([x[..., i::2, j::2] for i in (0, 1) for j in (0, 1)], 1)
            case "unshuffled":
                x = F.pixel_unshuffle(x, 2)
            case "blocks":
                x = x.view(len(x), WIDE, rows, 2, cols, 2).permute(0, 3, 5, 1, 2, 4)
                x = x.reshape(len(x), 4 * WIDE, rows, cols)
        return m.four(x)

    return Part(parted, one=conv(1), four=conv(1, 4 * WIDE))


@rule(DOWN, "blurred")
def _blurred(draw: Draw) -> nn.Module:
    kind = draw.of("edge", "constant", "reflect", "replicate")

    def blur(m: Any, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, [1] * 4, kind), m.blur, stride=2, groups=WIDE)

    part, row = Part(blur), torch.tensor([1.0, 2.0, 1.0])
    part.register_buffer("blur", row.outer(row).repeat(WIDE, 1, 1, 1) / 16, persistent=False)
    return part


@rule(UP, "transposed, cropped")
def _cropped(draw: Draw) -> nn.Module:
    return Part(
        lambda m, x: m.up(x)[:, :, : 2 * x.shape[2], : 2 * x.shape[3]],
        up=nn.ConvTranspose2d(WIDE, WIDE, 3, 2),
    )


@rule(UP, "maxima put back")
def _put_back(draw: Draw) -> nn.Module:
    width = draw.of("width", 2, 2, 4)

    def put_back(m: Any, x: Tensor) -> Tensor:
        fine = F.pixel_shuffle(m.wide(x), width).relu()
        values, places = F.max_pool2d(fine, width, return_indices=True)
        spread = F.max_unpool2d(m.one(values) + x, places, width)
        return spread if width == 2 else F.max_pool2d(spread, 2)

    return Part(put_back, wide=conv(3, WIDE, WIDE * width * width), one=conv(1))
