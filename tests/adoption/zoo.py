"""Small networks of the parts that people's networks are made of."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def block(wide: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(wide, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """A stem of 7 × 7 by 2, pooling by 3 × 3, and two residual blocks, as in ResNets."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 8, 7, 2)
        self.one, self.two = block(8, 8), block(8, 12, stride=2)
        self.short = nn.Conv2d(8, 12, 1, 2)
        self.head = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        x = F.relu_(self.one(x) + x)
        x = F.relu(self.two(x) + self.short(x))
        return F.interpolate(self.head(x), scale_factor=8, mode="bilinear")


class Gated(nn.Module):
    """Squeeze and excitation, depthwise convolutions, padding as in TensorFlow, drop path."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2)
        self.deep = nn.Conv2d(8, 16, 3, padding=1, groups=8, bias=False)
        self.norm = nn.BatchNorm2d(16, eps=1e-3, momentum=0.01)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.back = nn.Conv2d(16, 8, 1)
        self.head = nn.ConvTranspose2d(8, 3, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(F.pad(x, [0, 1, 0, 1])))
        y = F.hardswish(self.norm(self.deep(x)))
        gate = F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))
        y = self.back(torch.sigmoid(self.excite(gate)) * y)
        if self.training and getattr(self, "drops", True):
            y = y / 0.75 * torch.floor(0.75 + torch.rand(y.shape[0], 1, 1, 1))
        out: Tensor = self.head(x + y)
        return out


class Pyramid(nn.Module):
    """Averages of the whole image, enlarged by corners and not, and dilated branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 8, stride=2)
        self.bins = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(bins), block(8, 4, 1)) for bins in (1, 2, 3)
        )
        self.near = nn.Conv2d(8, 4, 3, padding=2, dilation=2)
        self.project = nn.Conv2d(24, 6, 3, padding=1)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Sequential(nn.Conv2d(6, 3, 1), nn.UpsamplingBilinear2d(scale_factor=2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        size = x.shape[2:]
        maps = [x, self.near(x)]
        for number, pool in enumerate(self.bins):
            corners = number == 1
            maps.append(F.interpolate(pool(x), size, mode="bilinear", align_corners=corners))
        return {"out": self.head(self.drop(self.project(torch.cat(maps, 1)))), "aux": x}


class Dense(nn.Module):
    """Maps that are used many times, nearest enlargement, group norm, and what leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.three = nn.Conv2d(12, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.stem, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(10, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(self.stem(x), 2)
        a = F.leaky_relu(self.one(x), 0.2)
        b = self.two(torch.cat([a, x], 1)).relu_()
        c = self.norm(self.three(torch.cat([x, b, a], 1)))
        torch.linalg.norm(c)  # used by nobody
        stacked = torch.stack([a, b, a * 0.5 + 1]).sum(0)
        up = F.interpolate(torch.cat([c, stacked], 1), scale_factor=2)
        out: Tensor = self.head(up)
        return out


class Channels(nn.Module):
    """Blocks of ConvNeXt: channels last, layer norm of cells, linear layers, layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.deep = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.norm = nn.LayerNorm(8, eps=1e-6)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.gamma = nn.Parameter(torch.full((8,), 0.7))
        self.head = nn.ConvTranspose2d(8, 2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        y = self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        out: Tensor = self.head(x + y * self.gamma.reshape(1, -1, 1, 1))
        return out


class Odd(nn.Module):
    """Maps that are smaller and larger than the image, and a gate with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=2)
        self.gate, self.drop = nn.Conv2d(4, 4, 1), nn.Dropout(0.4)
        self.fine, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        x = x + F.interpolate(F.adaptive_avg_pool2d(x, 2), x.shape[2:], mode="bilinear")
        x = self.two(x)
        x = x * self.drop(self.gate(x.mean((2, 3), keepdim=True))).sigmoid()
        x = self.drop(self.fine(F.interpolate(x, scale_factor=2)))
        out: Tensor = self.head(x)
        return out


class Looking(nn.Module):
    """What is averaged and normalised looks further than the output does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)
        self.far = nn.ModuleList(nn.Conv2d(4, 4, 9, padding=4, bias=False) for _ in range(3))
        self.norm, self.step = nn.InstanceNorm2d(4, affine=True), nn.BatchNorm2d(4)
        # Averages differ little: a small epsilon would blow their rounding up.
        self.of_bins, self.of_all = nn.InstanceNorm2d(4, 0.1), nn.GroupNorm(2, 4, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        gate = F.relu(self.far[0](x)).mean((2, 3), keepdim=True)
        x = x * torch.sigmoid(gate)
        y = self.step(F.silu(self.norm(self.far[1](x)))).tanh()
        x = x + y.mean((2, 3), keepdim=True)
        bins = self.of_bins(F.adaptive_avg_pool2d(self.far[2](x).sigmoid(), 3))
        large = F.interpolate(bins, x.shape[2:], mode="bilinear")
        again = F.adaptive_avg_pool2d(x * large, 2).mean((2, 3), keepdim=True)
        out: Tensor = self.head(x + self.of_all(again))
        return out


class Shifted(nn.Module):
    """A cell that is lost on one side is given back on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.one(F.pad(x, [0, 1, 0, 1])))
        out: Tensor = self.two(F.pad(x, [1, 2, 1, 2]))
        return out


class Between(nn.Module):
    """Maps whose cells begin between those of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 4, 2), nn.Conv2d(4, 3, 3, padding=2)
        self.even, self.back = nn.Conv2d(3, 4, 2), nn.Conv2d(4, 3, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        large = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=True)
        y = self.two(F.relu(large + F.interpolate(y, scale_factor=2)))
        out: Tensor = y + self.back(self.even(x).relu())
        return out


class Cropped(nn.Module):
    """Maps that are joined between each other's cells, as in FCN-8s, with a gate in between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=10), nn.Conv2d(4, 4, 3, padding=1)
        self.last, self.gate = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)
        self.up, self.head = nn.ConvTranspose2d(4, 4, 4, 2), nn.ConvTranspose2d(4, 2, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        x = F.max_pool2d(F.relu(self.one(x)), 2, ceil_mode=True)
        y = self.up(self.last(F.max_pool2d(self.two(x).relu(), 2, ceil_mode=True)))
        x = y + x[:, :, 1 : 1 + y.shape[2], 1 : 1 + y.shape[3]]
        large = F.interpolate(F.adaptive_avg_pool2d(x, 2), x.shape[2:], mode="bilinear")
        x = x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid() + large
        out: Tensor = self.head(x)[:, :, 8 : 8 + size[0], 8 : 8 + size[1]]
        return out


class Begun(nn.Module):
    """A valid encoder whose map is enlarged to the image's size, as under backbones of timm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.deep = nn.Conv2d(4, 4, 3, padding=1)
        self.head, self.gate = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.deep(self.stem(x))
        y = y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid()
        return F.interpolate(self.head(y), size=x.shape[2:], mode="bilinear", align_corners=True)


def mean(x: Tensor) -> Tensor:
    return x.mean((2, 3), keepdim=True)


def bins(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x, 3).sigmoid()


def like(y: Tensor, x: Tensor) -> Tensor:
    return F.interpolate(y, x.shape[2:])


# What is summed of a map `y` that looks further than the map `x` which it is joined with.
SUMS: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "gate": lambda m, x, y: x * mean(F.relu(y)).sigmoid(),
    "bins": lambda m, x, y: x * like(bins(y), x),
    "norm": lambda m, x, y: x * mean(F.silu(m.norm(y))),
    "batch norm": lambda m, x, y: x * mean(F.silu(m.batch(y))),
    "average of bins": lambda m, x, y: x * mean(bins(y)),
    "average of enlarged bins": lambda m, x, y: x * mean(like(bins(y), x) * x),
    "norm of bins": lambda m, x, y: x * like(m.norm(bins(y)), x),
    "norm of enlarged bins": lambda m, x, y: x + m.norm(like(bins(y), x)),
    "shares of all cells": lambda m, x, y: (
        x + (y.flatten(2).softmax(-1) @ x.flatten(2).mT).sum(2)[..., None, None]
    ),
    "norm of averages": lambda m, x, y: x * m.groups(mean(y).tanh()),
}


class Sum(nn.Module):
    """One of them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)
        self.far = nn.Conv2d(4, 4, 9, padding=4)
        self.norm, self.batch = nn.InstanceNorm2d(4, 0.1), nn.BatchNorm2d(4)
        self.groups = nn.GroupNorm(2, 4, 0.1)
        self.sum = SUMS[name]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out: Tensor = self.head(self.sum(self, x, self.far(x)))
        return out


class Grouped(nn.Module):
    """Channels in groups, shuffled, weighed by an attention over them; kernels not square."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 8, 4, 2, 1), nn.PReLU(8, 0.3)
        self.one = nn.Conv2d(4, 4, (1, 7), padding=(0, 3), groups=2)
        self.two = nn.Conv2d(4, 4, (3, 1), padding=(2, 0), dilation=(2, 1))
        self.squeeze, self.scale = nn.Linear(4, 8), nn.Parameter(torch.rand(4, 1, 1))
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 16)
        self.head = nn.ConvTranspose2d(8, 3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stem(x))
        first, second = x.chunk(2, 1)
        parts = torch.stack([self.one(first), F.selu(self.two(second))], 1)
        gate = self.squeeze(parts.sum(1).mean((2, 3))).view(len(x), 2, 4, 1, 1).softmax(1)
        y = (parts * gate * (1 + self.scale)).flatten(1, 2)
        y = y.view(len(x), 2, 4, *x.shape[2:]).transpose(1, 2).reshape(x.shape)
        cells = self.linear(self.norm((x - y).flatten(2).mT))
        out: Tensor = self.head(F.glu(cells, -1).mT.reshape(x.shape) + x.clamp(max=2.0))
        return out


class Shared(nn.Module):
    """One encoder of two images' bands, a convolution that recurs, bent lines, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(2, 6, 5, 2, 2), nn.PReLU(6, 0.3))
        self.again, self.act = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.PReLU(init=0.2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(2))
        self.scale, self.norm = nn.Parameter(torch.rand(6, 1, 1)), nn.BatchNorm2d(6)
        self.norm.bias = self.norm.weight
        self.down = nn.Conv2d(6, 6, 2, 2)
        self.head, self.other = nn.Conv2d(6, 3, 3, padding=1), nn.Conv2d(6, 3, 3, padding=1)
        self.other.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        before, after = (self.encoder(one) for one in (x[:, :2], x[:, 1:]))
        y = after - before
        for norm in self.norms:
            y = self.act(norm(self.again(y + after))) * self.scale
        y = self.norm(y + before)
        low = self.down(y)
        gate = self.down(low).mean((2, 3), keepdim=True).sigmoid()
        small = F.interpolate(self.head(low * gate), scale_factor=2, mode="bilinear")
        return F.interpolate(self.other(y) + self.head(y.tanh()) + small, scale_factor=2)


class Moved(nn.Module):
    """Every other pixel as channels, kernels that are computed or fixed, pads before a maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.BatchNorm2d(12), nn.Conv2d(12, 8, 3, padding=1)
        self.gain = nn.Parameter(torch.rand(8, 1, 1, 1) + 0.5)
        blur = torch.tensor([1.0, 2.0, 1.0]).outer(torch.tensor([1.0, 2.0, 1.0])) / 16
        self.register_buffer("blur", blur.repeat(8, 1, 1, 1), persistent=False)
        self.one = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1))
        self.up, self.head = nn.ConvTranspose2d(8, 8, 3, 2), nn.ConvTranspose2d(16, 3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.cat([x[..., i::2, j::2] for i in (0, 1) for j in (0, 1)], 1))
        kernel, bias = self.down.weight, self.down.bias
        kernel = self.gain * (kernel - kernel.mean((1, 2, 3), keepdim=True)) / kernel.norm()
        x = F.conv2d(x, kernel, bias, padding=1).relu()
        y = F.conv2d(F.pad(x, [1] * 4, "reflect"), self.blur, stride=2, groups=8)
        y = F.max_pool2d(F.pad(self.one(y), [0, 1, 0, 1]), 2, 1)
        y = self.up(y)[:, :, : x.shape[2], : x.shape[3]]
        out: Tensor = self.head(torch.cat([x + F.pad(y[..., 1:, 1:], [1, 0, 1, 0]), y], 1))
        return out


class Located(nn.Module):
    """Coordinates: from end to end, of cells' middles and edges, counted; convolved; and waves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(5, 6, stride=2)
        self.places, self.deep = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(7, 6, 3, padding=1)
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        (h, w), kind = x.shape[2:], {"dtype": x.dtype, "device": x.device}
        both = torch.meshgrid(
            torch.linspace(-1, 1, h, **kind), torch.linspace(0, 3, w, **kind), indexing="ij"
        )
        laid = torch.stack(both).expand(len(x), -1, -1, -1)
        wide = self.places(laid)
        x = self.stem(torch.cat([x, laid], 1))
        (h, w) = x.shape[2:]
        rows, cols = torch.arange(h, **kind)[:, None], torch.arange(w, **kind)
        x = x * (0.5 - rows / h) + (cols + 0.5) / w * 2
        x = self.deep(torch.cat([x, (x[:, :1].sigmoid() + rows + cols).cos()], 1))
        places = torch.ones((len(x), h, w), **kind).cumsum(2) / (w + 1e-6)
        x = x * torch.stack([(places * 7).sin(), places.square()], 1).sum(1, keepdim=True)
        x = F.interpolate(x, scale_factor=2, mode="bilinear")
        return self.head(x * wide.sigmoid())


class Resized(nn.Module):
    """The image smaller by corners, by middles of blocks; maps larger by cubic curves."""

    def __init__(self) -> None:
        super().__init__()
        self.two, self.three = block(3, 4, 5), nn.Conv2d(3, 4, 3, padding=1)
        self.stem, self.four = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        half = F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=True)
        third = self.three(F.interpolate(x, scale_factor=1 / 3, mode="bilinear"))
        quarter = self.four(F.interpolate(self.stem(x), scale_factor=0.25, mode="bilinear"))
        y = self.two(half) + F.interpolate(quarter, scale_factor=2, mode="bicubic")
        y = F.interpolate(y, size=x.shape[2:], mode="bicubic")
        out: Tensor = self.head(y + F.interpolate(third.sigmoid(), scale_factor=3, mode="bicubic"))
        return out


ZOO: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "gated": Gated,
    "pyramid": Pyramid,
    "dense": Dense,
    "channels": Channels,
    "odd": Odd,
    "looking": Looking,
    "shifted": Shifted,
    "between": Between,
    "cropped": Cropped,
    "begun": Begun,
    "grouped": Grouped,
    "shared": Shared,
    "moved": Moved,
    "located": Located,
    "resized": Resized,
}


def network(name: str, *, drops: bool = True, fixed: Sequence[str] = ()) -> nn.Module:
    """One of them, with weights and statistics of which none is 0 or 1.

    Args:
        fixed: Parts that are not trained.
    """
    torch.manual_seed(3)
    made = ZOO[name]()
    if not drops:
        for module in made.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        made.drops = False
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            if tensor.dim() == 1:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    for part in fixed:
        made.get_submodule(part).requires_grad_(False)
    return made
