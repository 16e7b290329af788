"""The parts that generated modules are made of: each keeps, halves or doubles the map's size.

A part is a rule: it draws its numbers, which its description names, and gives a module that takes
and gives maps of `WIDE` channels.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from draw import Draw
from torch import Tensor, nn

WIDE = 4

__all__ = ["DOWN", "KEEP", "RARE", "STEM", "UP", "WIDE", "Part", "conv", "rule"]


class Part(nn.Module):
    """Submodules and a function of them and of maps."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *maps: Tensor) -> Any:
        return self.function(self, *maps)


class Evaluating(nn.Module):
    """A part that stays in evaluation whatever `train` is called with."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def train(self, mode: bool = True) -> "Evaluating":
        super().train(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(x)
        return out


Rule = Callable[[Draw], nn.Module]
KEEP: dict[str, Rule] = {}
RARE: dict[str, Rule] = {}  # keep the size too
DOWN: dict[str, Rule] = {}
UP: dict[str, Rule] = {}
STEM: dict[str, Rule] = {}  # by 2 too, of the image's channels


def rule(table: dict[str, Rule], name: str) -> Callable[[Rule], Rule]:
    def keep(function: Rule) -> Rule:
        assert name not in table
        table[name] = function
        return function

    return keep


def conv(kernel: int, wide: int = WIDE, out: int = WIDE, **more: Any) -> nn.Conv2d:
    more.setdefault("padding", more.get("dilation", 1) * (kernel // 2))
    return nn.Conv2d(wide, out, kernel, **more)


def enlarged(x: Tensor, size: Any, mode: str) -> Tensor:
    if mode in ("nearest", "bicubic"):
        return F.interpolate(x, size, mode=mode)
    return F.interpolate(x, size, mode="bilinear", align_corners=mode == "corners")


def any_norm(draw: Draw) -> nn.Module:
    match draw.of("norm", "batch", "instance", "instance affine", "group", "none"):
        case "batch":
            return nn.BatchNorm2d(WIDE)
        case "instance":
            return nn.InstanceNorm2d(WIDE)
        case "instance affine":
            return nn.InstanceNorm2d(WIDE, affine=True)
        case "group":
            return nn.GroupNorm(2, WIDE)
    return nn.Identity()


FUNCTIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "relu_": lambda: nn.ReLU(inplace=True), "leaky": lambda: nn.LeakyReLU(0.2),
    "gelu": nn.GELU, "silu": nn.SiLU, "hardswish": nn.Hardswish, "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh, "elu": nn.ELU, "softplus": nn.Softplus, "mish": nn.Mish, "relu6": nn.ReLU6,
    "none": nn.Identity,
}  # fmt: skip


def stem(name: str, make: Callable[[Draw, int], nn.Module]) -> None:
    STEM[name] = lambda draw: make(draw, 3)
    DOWN[name] = lambda draw: make(draw, WIDE)


stem("3×3/2", lambda d, wide: conv(3, wide, stride=2))
stem("7×7/2", lambda d, wide: conv(7, wide, stride=2))
stem("5×5/2", lambda d, wide: conv(5, wide, stride=2))
stem("2×2/2", lambda d, wide: conv(2, wide, stride=2, padding=0))
stem("4×4/2", lambda d, wide: conv(4, wide, stride=2, padding=1))
stem("6×6/2", lambda d, wide: conv(6, wide, stride=2, padding=2))
stem(
    "4×4/2 unpadded, 2×2 padded",
    lambda d, wide: nn.Sequential(
        conv(4, wide, stride=2, padding=0), nn.ReLU(), conv(2, padding=1)
    ),
)
stem("1×1/2", lambda d, wide: conv(1, wide, stride=2))
stem(
    "TensorFlow's 3×3/2",
    lambda d, wide: Part(
        lambda m, x: m.conv(F.pad(x, [0, 1, 0, 1])), conv=conv(3, wide, stride=2, padding=0)
    ),
)
stem(
    "3×3, max pool",
    lambda d, wide: nn.Sequential(conv(3, wide), nn.ReLU(), nn.MaxPool2d(d.of("pool", 2))),
)
stem(
    "3×3, max pool 3/2/1",
    lambda d, wide: nn.Sequential(
        conv(3, wide), FUNCTIONS[d.of("f", "relu", "none")](), nn.MaxPool2d(3, 2, 1)
    ),
)
stem("1×1, average pool", lambda d, wide: nn.Sequential(conv(1, wide), nn.AvgPool2d(2)))
stem(
    "1×1, average pool 3/2/1",
    lambda d, wide: nn.Sequential(conv(1, wide), nn.AvgPool2d(3, 2, 1)),
)
stem(
    "3×3, max pool with ceil",
    lambda d, wide: nn.Sequential(conv(3, wide), nn.MaxPool2d(d.of("k", 2, 3), 2, ceil_mode=True)),
)


@rule(KEEP, "block")
def _block(draw: Draw) -> nn.Module:
    kernel, dilation = draw.of("k", 1, 3, 3, 5, 7), draw.of("dilation", 1, 1, 2, 3)
    groups, bias = draw.of("groups", 1, 1, 2, WIDE), draw.of("bias", True, False)
    made = conv(kernel, dilation=dilation, groups=groups, bias=bias)
    return nn.Sequential(made, any_norm(draw), FUNCTIONS[draw.of("f", *FUNCTIONS)]())


@rule(KEEP, "residual")
def _residual(draw: Draw) -> nn.Module:
    function, order = FUNCTIONS[draw.of("f", "relu", "relu_", "silu")], draw.of("order", 0, 1)
    body = nn.Sequential(conv(3), any_norm(draw), function(), conv(3), any_norm(draw))
    last = function()
    if order:
        return Part(lambda m, x: m.last(x + m.body(x)), body=body, last=last)
    return Part(lambda m, x: m.last(m.body(x) + x), body=body, last=last)


@rule(KEEP, "pre-activation")
def _pre_activation(draw: Draw) -> nn.Module:
    body = nn.Sequential(any_norm(draw), FUNCTIONS[draw.of("f", *FUNCTIONS)](), conv(3))
    return Part(lambda m, x: x + m.scale * m.body(x), body=body, scale=draw.of("scale", 0.5, 1))


@rule(KEEP, "norm")
def _norm(draw: Draw) -> nn.Module:
    return any_norm(draw)


@rule(KEEP, "layer norm of channels")
def _layer_norm(draw: Draw) -> nn.Module:
    more = draw.of("linear", True, False)
    return Part(
        lambda m, x: m.linear(m.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2),
        norm=nn.LayerNorm(WIDE),
        linear=nn.Linear(WIDE, WIDE) if more else nn.Identity(),
    )


@rule(KEEP, "valid, then wide")
def _valid_then_wide(draw: Draw) -> nn.Module:
    first = draw.of("first", "valid", "wide")
    parts = [conv(3, padding=0), nn.ReLU(), conv(3, padding=2)]
    return nn.Sequential(*(parts if first == "valid" else reversed(parts)))


@rule(KEEP, "even kernels")
def _even(draw: Draw) -> nn.Module:
    kernel = draw.of("k", 2, 4)
    if draw.of("same", False, rare=(True,)):
        return conv(kernel, padding="same")
    return nn.Sequential(conv(kernel, padding=kernel // 2), conv(kernel, padding=kernel // 2 - 1))


@rule(KEEP, "unequal zeros")
def _unequal(draw: Draw) -> nn.Module:
    match draw.of("form", "0101 2×2", "1212 4×4", rare=("0101 1212", "1212 0101", "1010 2×2")):
        case "0101 1212":
            pads, kernels = [[0, 1, 0, 1], [1, 2, 1, 2]], [3, 3]
        case "1212 0101":
            pads, kernels = [[1, 2, 1, 2], [0, 1, 0, 1]], [3, 3]
        case "0101 2×2":
            pads, kernels = [[0, 1, 0, 1]], [2]
        case "1010 2×2":
            pads, kernels = [[1, 0, 1, 0]], [2]
        case _:
            pads, kernels = [[1, 2, 1, 2]], [4]

    def through(m: Any, x: Tensor) -> Tensor:
        for pad, one in zip(pads, m.convs, strict=True):
            x = one(F.pad(x, pad))
        return x

    return Part(through, convs=nn.ModuleList(conv(k, padding=0) for k in kernels))


@rule(KEEP, "pool in place")
def _pool(draw: Draw) -> nn.Module:
    made = nn.MaxPool2d if draw.of("how", "max", "average") == "max" else nn.AvgPool2d
    kernel = draw.of("k", 3, 5)
    return made(kernel, 1, kernel // 2)


@rule(KEEP, "gate")
def _gate(draw: Draw) -> nn.Module:
    form = draw.of("mean", "mean", "adaptive")
    first = draw.of("gate first", True, False)

    def gate(m: Any, x: Tensor) -> Tensor:
        mean = x.mean((2, 3), keepdim=True) if form == "mean" else F.adaptive_avg_pool2d(x, 1)
        g = torch.sigmoid(m.two(F.relu(m.one(mean))))
        return g * x if first else x * g

    return Part(gate, one=conv(1, WIDE, 2), two=conv(1, 2, WIDE))


@rule(KEEP, "wide gate")
def _wide_gate(draw: Draw) -> nn.Module:
    kernel = draw.of("k", 3, 9, 13)

    def gate(m: Any, x: Tensor) -> Tensor:
        return x * torch.sigmoid(F.relu(m.conv(x)).mean((2, 3), keepdim=True))

    return Part(gate, conv=conv(kernel))


@rule(KEEP, "spatial gate")
def _spatial_gate(draw: Draw) -> nn.Module:
    return Part(lambda m, x: x * m.conv(x).sigmoid(), conv=conv(draw.of("k", 1, 3)))


@rule(KEEP, "image pool")
def _image_pool(draw: Draw) -> nn.Module:
    bins, mode = draw.of("bins", 1, 2, 3), draw.of("mode", "nearest", "bilinear", "corners")
    join, first = draw.of("join", "cat", "add", "mul"), draw.of("pool first", True, False)
    wide = draw.of("conv before", 0, 0, 7)
    norm = any_norm(draw) if bins > 1 else nn.Identity()

    def pool(m: Any, x: Tensor) -> Tensor:
        y = m.norm(m.conv(F.adaptive_avg_pool2d(m.before(x), bins)))
        y = enlarged(F.relu(y), x.shape[2:], mode)
        if join == "cat":
            out: Tensor = m.project(torch.cat([y, x] if first else [x, y], 1))
            return out
        if join == "add":
            return y + x if first else x + y
        return y * x if first else x * y

    project = conv(1, 2 * WIDE) if join == "cat" else nn.Identity()
    before = conv(wide) if wide else nn.Identity()
    return Part(pool, conv=conv(1), norm=norm, project=project, before=before)


@rule(KEEP, "average of an average")
def _average_of_average(draw: Draw) -> nn.Module:
    form, mode = draw.of("form", "bins", "enlarged"), draw.of("mode", "nearest", "bilinear")

    def pool(m: Any, x: Tensor) -> Tensor:
        y = F.adaptive_avg_pool2d(m.conv(x), 2)
        if form == "enlarged":
            y = enlarged(y, x.shape[2:], mode) * x
        return x + torch.tanh(F.silu(y).mean((2, 3), keepdim=True)) * x

    return Part(pool, conv=conv(draw.of("k", 1, 3, 7)))


@rule(KEEP, "pyramid")
def _pyramid(draw: Draw) -> nn.Module:
    mode = draw.of("mode", "nearest", "bilinear", "corners")
    near = draw.of("dilated", True, False)

    def pyramid(m: Any, x: Tensor) -> Tensor:
        maps = [x] + [
            enlarged(one(F.adaptive_avg_pool2d(x, n + 1)), x.shape[2:], mode)
            for n, one in enumerate(m.convs)
        ]
        out: Tensor = m.project(torch.cat(maps + ([m.near(x)] if near else []), 1))
        return out

    convs = nn.ModuleList(conv(1, WIDE, 2) for _ in range(3))
    return Part(
        pyramid,
        convs=convs,
        near=conv(3, dilation=3),
        project=conv(3, (2 if near else 1) * WIDE + 6),
    )


@rule(KEEP, "scale")
def _scale(draw: Draw) -> nn.Module:
    forms: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "x * gamma": lambda m, x: x * m.gamma,
        "gamma * x": lambda m, x: m.gamma * x,
        "2 * x": lambda m, x: 2 * x,
        "x / 3": lambda m, x: x / 3,
        "x - 0.25": lambda m, x: x - 0.25,
        "x * (1 + gamma)": lambda m, x: x * (1 + m.gamma),
        "(gamma + 1) * x + beta": lambda m, x: (m.gamma + 1) * x + m.beta,
        "beta + x": lambda m, x: m.beta + x,
        "x - beta": lambda m, x: x - m.beta,
        "0.5 + x": lambda m, x: 0.5 + x,
        "1 - x": lambda m, x: 1 - x,
        "-x": lambda m, x: -x,
        "add alpha": lambda m, x: torch.add(x, m.beta, alpha=2),
        "x / gamma": lambda m, x: x / m.gamma,
        "x.mul_": lambda m, x: (x + 0).mul_(m.gamma),
        "x ** 2": lambda m, x: x**2,
        "x * (gamma + beta)": lambda m, x: x * (m.gamma + m.beta),
        "x.mean() * x": lambda m, x: x.mean() * x,
        "x + x.detach()": lambda m, x: x + x.detach(),
        "leaky -0.1": lambda m, x: F.leaky_relu(x, -0.1),
        "clamp": lambda m, x: x.clamp(-1, 1),
    }
    names = list(forms)
    form = forms[draw.of("form", *names[:5], rare=tuple(names[5:]))]
    shape = draw.of("shape", (1, WIDE, 1, 1), (WIDE, 1, 1), rare=((1,), ()))
    gamma, beta = (nn.Parameter(torch.rand(shape) + 0.5) for _ in range(2))
    return Part(form, gamma=gamma, beta=beta)


@rule(KEEP, "dropout")
def _dropout(draw: Draw) -> nn.Module:
    match draw.of("form", "cells", "channels", "flag", rare=("not training", "last")):
        case "cells":
            return nn.Dropout(0.3)
        case "channels":
            return nn.Dropout2d(0.3)
        case "not training":
            return Part(lambda m, x: F.dropout(x, 0.4, training=False))
        case "last":
            drop = nn.Dropout2d(0.3)
            return Part(lambda m, x: m.drop(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), drop=drop)
    return Part(lambda m, x: F.dropout(x, 0.4, m.training))


@rule(RARE, "kept in evaluation")
def _evaluating(draw: Draw) -> nn.Module:
    form = draw.of("form", "batch", "dropout", "both")
    parts: list[nn.Module] = [conv(3)]
    if form != "dropout":
        parts.append(nn.BatchNorm2d(WIDE))
    if form != "batch":
        parts.append(nn.Dropout(0.4))
    return Evaluating(nn.Sequential(*parts))


@rule(RARE, "fixed weights")
def _fixed(draw: Draw) -> nn.Module:
    form = draw.of("form", "weight", "all", "detach", "made")
    made = conv(3)
    if form == "made":
        return Part(lambda m, x: F.conv2d(x, 2.0 * m.conv.weight, padding=1), conv=made)
    if form == "detach":
        return Part(lambda m, x: F.conv2d(x, m.conv.weight.detach(), padding=1), conv=made)
    made.weight.requires_grad_(False)
    if form == "all":
        made.requires_grad_(False)
    return made


class Buffered(nn.Module):
    """A buffer that scales the map, and may change in forward."""

    def __init__(self, form: str, persistent: bool) -> None:
        super().__init__()
        self.form = form
        start = torch.rand(1, WIDE, 1, 1) + 0.5 if form != "count" else torch.tensor(1.0)
        self.register_buffer("seen", start, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "count":
            self.seen += 1
        elif self.form == "running mean":
            self.seen.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3), keepdim=True))
        elif self.form == "count that is not used":
            self.seen += 1
            return torch.tanh(x)
        return x * self.seen


@rule(RARE, "buffer")
def _buffer(draw: Draw) -> nn.Module:
    form = draw.of("form", "fixed", "fixed", "count", "running mean", "count that is not used")
    return Buffered(form, draw.of("persistent", True, False))


@rule(RARE, "branch")
def _branch(draw: Draw) -> nn.Module:
    axis, modulus = draw.of("axis", 0, 2, 3), draw.of("modulus", 2, 4, 64)

    def branch(m: Any, x: Tensor) -> Tensor:
        return x * 2 if x.shape[axis] % modulus else m.conv(x)

    return Part(branch, conv=conv(1))


@rule(KEEP, "rectangular")
def _rectangular(draw: Draw) -> nn.Module:
    form = draw.of("form", "pair", "one", "dilated", "same", "grouped")
    if form == "pair":
        pads = [(0, 1), (1, 0)]
        return nn.Sequential(
            nn.Conv2d(WIDE, WIDE, (1, 3), padding=pads[0]),
            nn.Conv2d(WIDE, WIDE, (3, 1), padding=pads[1]),
        )
    match form:
        case "dilated":
            return nn.Conv2d(WIDE, WIDE, (3, 1), padding=(3, 0), dilation=(3, 1))
        case "same":
            return nn.Conv2d(WIDE, WIDE, (1, 7), padding="same", bias=False)
        case "grouped":
            return nn.Conv2d(WIDE, WIDE, (5, 1), padding=(2, 0), groups=WIDE)
    return nn.Conv2d(WIDE, WIDE, (3, 5), padding=(1, 2))


@rule(KEEP, "edges")
def _edges(draw: Draw) -> nn.Module:
    """Paddings made of the map, and averages of its cells alone."""
    form = draw.of("form", "reflect", "replicate", "counted", "small and large")
    match form:
        case "counted":
            kernel = draw.of("k", 3, 5)
            return nn.AvgPool2d(kernel, 1, kernel // 2, count_include_pad=False)
        case "small and large":
            by, mode = draw.of("by", 2, 4), draw.of("mode", "nearest", "bilinear", "corners")
            return Part(
                lambda m, x: F.interpolate(
                    enlarged(x, (x.shape[2] // by, x.shape[3] // by), mode), scale_factor=by
                ),
                divides=by,
            )
    kernel, dilation = draw.of("kernel", (3, 1), (3, 2), (5, 1))
    pad, kind = dilation * (kernel // 2), "replicate" if form == "replicate" else "reflect"
    if draw.of("by", "itself", "before") == "before":
        return nn.Sequential(nn.ReplicationPad2d(1), conv(3, padding=0))
    return conv(kernel, padding=pad, dilation=dilation, padding_mode=kind)


@rule(UP, "transposed 2/2")
def _transposed_two(draw: Draw) -> nn.Module:
    return nn.ConvTranspose2d(WIDE, WIDE, 2, 2, groups=draw.of("groups", 1, 2))


@rule(UP, "transposed 4/2/1")
def _transposed_four(draw: Draw) -> nn.Module:
    return nn.ConvTranspose2d(WIDE, WIDE, 4, 2, 1, bias=draw.of("bias", True, False))


@rule(UP, "transposed 3/2/1/1")
def _transposed_three(draw: Draw) -> nn.Module:
    return nn.ConvTranspose2d(WIDE, WIDE, 3, 2, 1, output_padding=1)


@rule(UP, "enlarged")
def _enlarged(draw: Draw) -> nn.Module:
    mode = draw.of("mode", "nearest", "bilinear", "corners", "bicubic")
    by = draw.of("by", "factor", "size", "pixels")
    if by == "pixels":
        return nn.Sequential(conv(1, WIDE, 4 * WIDE), nn.PixelShuffle(2))

    def enlarge(m: Any, x: Tensor) -> Tensor:
        if by == "size":
            return enlarged(x, (2 * x.shape[2], 2 * x.shape[3]), mode)
        if mode in ("nearest", "bicubic"):
            return F.interpolate(x, scale_factor=2, mode=mode)
        return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=mode == "corners")

    return Part(enlarge)
