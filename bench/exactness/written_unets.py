# mypy: disable-error-code="no-any-return"
"""U-Nets as people write them in repositories of their own, small but true to their parts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BANDS, CLASSES = 4, 5


def conv(wide: int, out: int, kernel: int = 3, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    around = dilation * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(wide, out, kernel, stride, around, dilation, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    )


def twice(wide: int, out: int) -> nn.Sequential:
    """The block of U-Nets."""
    return nn.Sequential(conv(wide, out), conv(out, out))


def resized(x: Tensor, like: Tensor) -> Tensor:
    """A map at another's size."""
    return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=False)


class Up(nn.Module):
    """Enlarge, pad by the difference of sizes, concatenate: milesial/Pytorch-UNet."""

    def __init__(self, wide: int, out: int, bilinear: bool) -> None:
        super().__init__()
        self.up: nn.Module = nn.ConvTranspose2d(wide, wide // 2, kernel_size=2, stride=2)
        if bilinear:
            up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.up = nn.Sequential(up, nn.Conv2d(wide, wide // 2, 1))
        self.conv = twice(wide, out)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        x1 = self.up(x1)
        dy, dx = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    """U-Net (Ronneberger 2015) as in milesial/Pytorch-UNet; subclasses change the skips."""

    def __init__(self, bilinear: bool = False) -> None:
        super().__init__()
        self.inc = twice(BANDS, 8)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), twice(wide, 2 * wide)) for wide in (8, 16, 32)
        )
        self.ups = nn.ModuleList(Up(2 * wide, wide, bilinear) for wide in (32, 16, 8))
        self.outc = nn.Conv2d(8, CLASSES, 1)

    def skip(self, number: int, map_: Tensor, below: Tensor) -> Tensor:
        return map_

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.inc(x)]
        for down in self.down:
            maps.append(down(maps[-1]))
        y = maps[-1]
        for number, up in enumerate(self.ups):
            y = up(y, self.skip(number, maps[2 - number], y))
        return self.outc(y)


class UNetLogSoftmax(UNet):
    """Gives logarithms of probabilities, for NLLLoss."""

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(super().forward(x), dim=1)


class UNetClamped(UNet):
    """A regression whose map is clamped."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(0, 1)


class AttentionGate(nn.Module):
    """Additive gate of a skip: LeeJunHyun/Image_Segmentation."""

    def __init__(self, deep: int, wide: int) -> None:
        super().__init__()
        half = wide // 2
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), conv(deep, wide))
        self.w_g = nn.Sequential(nn.Conv2d(wide, half, 1), nn.BatchNorm2d(half))
        self.w_x = nn.Sequential(nn.Conv2d(wide, half, 1), nn.BatchNorm2d(half))
        self.psi = nn.Sequential(nn.Conv2d(half, 1, 1), nn.BatchNorm2d(1), nn.Sigmoid())

    def forward(self, g: Tensor, x: Tensor) -> Tensor:
        return x * self.psi(F.relu(self.w_g(self.up(g)) + self.w_x(x)))


class AttentionUNet(UNet):
    """Attention U-Net (Oktay 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(AttentionGate(2 * wide, wide) for wide in (32, 16, 8))

    def skip(self, number: int, map_: Tensor, below: Tensor) -> Tensor:
        gated: Tensor = self.gates[number](below, map_)
        return gated


class SELayer(nn.Module):
    """Squeeze and excitation with view and Linear: moskomule/senet.pytorch."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(wide, wide // 4, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(wide // 4, wide, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        y = self.avg_pool(x).view(b, c)
        y = self.fc(y).view(b, c, 1, 1)
        return x * y.expand_as(x)


class ECALayer(nn.Module):
    """Gate by a convolution over channels: BangguWu/ECANet."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.conv = nn.Conv1d(1, 1, kernel_size=3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.avg_pool(x)
        y = self.conv(y.squeeze(-1).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-1)
        return x * torch.sigmoid(y).expand_as(x)


class CBAM(nn.Module):
    """Gates of channels by mean and maximum, then of cells: Jongchan/attention-module."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Flatten(), nn.Linear(wide, wide // 4), nn.ReLU(), nn.Linear(wide // 4, wide)
        )
        self.spatial = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        whole = x.size(2), x.size(3)
        average = F.avg_pool2d(x, whole, stride=whole)
        largest = F.max_pool2d(x, whole, stride=whole)
        gate = torch.sigmoid(self.mlp(average) + self.mlp(largest))
        x = x * gate.unsqueeze(2).unsqueeze(3).expand_as(x)
        pooled = torch.cat([torch.max(x, 1)[0].unsqueeze(1), torch.mean(x, 1).unsqueeze(1)], dim=1)
        return x * torch.sigmoid(self.spatial(pooled))


class MaxSqueeze(nn.Module):
    """Gate of channels by adaptive average and maximum, with 1 × 1 convolutions: luuuyi/CBAM."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.avg_pool, self.max_pool = nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1)
        self.fc1 = nn.Conv2d(wide, wide // 4, 1, bias=False)
        self.fc2 = nn.Conv2d(wide // 4, wide, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        average = self.fc2(F.relu(self.fc1(self.avg_pool(x))))
        largest = self.fc2(F.relu(self.fc1(self.max_pool(x))))
        return x * torch.sigmoid(average + largest)


class SCSE(nn.Module):
    """Gates of channels and cells side by side (Roy 2018)."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.cell = nn.Conv2d(wide, 1, 1, bias=False)
        self.channel = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, wide // 2, 1), nn.ReLU(inplace=True),
            nn.Conv2d(wide // 2, wide, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.max(x * torch.sigmoid(self.cell(x)), x * self.channel(x))


class NonLocal(nn.Module):
    """Attention over pixels: AlexHex7/Non-local_pytorch."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.theta, self.phi, self.g, self.w = (nn.Conv2d(wide, wide, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        theta, phi, g = (one(x).view(b, c, -1) for one in (self.theta, self.phi, self.g))
        pairs = F.softmax(theta.transpose(1, 2) @ phi, dim=-1)
        return x + self.w((pairs @ g.transpose(1, 2)).transpose(1, 2).reshape(b, c, h, w))


GATES = {
    "se": SELayer, "eca": ECALayer, "cbam": CBAM, "max": MaxSqueeze, "scse": SCSE,
    "non local": NonLocal,
}  # fmt: skip


class GatedUNet(UNet):
    """A U-Net whose lowest skips run through a gate."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gates = nn.ModuleList(GATES[gate](wide) for wide in (32, 16))

    def skip(self, number: int, map_: Tensor, below: Tensor) -> Tensor:
        return self.gates[number](map_) if number < len(self.gates) else map_


class PreActivated(nn.Module):
    """Residual block with its norm first."""

    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.BatchNorm2d(wide), nn.ReLU(), nn.Conv2d(wide, out, 3, stride, 1),
            nn.BatchNorm2d(out), nn.ReLU(), nn.Conv2d(out, out, 3, padding=1),
        )  # fmt: skip
        self.skip = nn.Sequential(nn.Conv2d(wide, out, 3, stride, 1), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.skip(x)


class ResUNet(nn.Module):
    """Deep residual U-Net (Zhang 2018): rishikksh20/ResUnet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(BANDS, 8), nn.Conv2d(8, 8, 3, padding=1))
        self.short = nn.Conv2d(BANDS, 8, 3, padding=1)
        self.one, self.two = PreActivated(8, 16, 2), PreActivated(16, 32, 2)
        self.up_two = nn.ConvTranspose2d(32, 32, 2, 2)
        self.up_one = nn.ConvTranspose2d(16, 16, 2, 2)
        self.back_two, self.back_one = PreActivated(48, 16, 1), PreActivated(24, 8, 1)
        self.head = nn.Sequential(nn.Conv2d(8, CLASSES, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        a = self.stem(x) + self.short(x)
        b = self.one(a)
        y = self.back_two(torch.cat([self.up_two(self.two(b)), b], 1))
        return self.head(self.back_one(torch.cat([self.up_one(y), a], 1)))


class Recurrent(nn.Module):
    """A convolution that runs several times with the same weights."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.conv = conv(wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        for _ in range(2):
            y = self.conv(x + y)
        return y


class R2UNet(UNet):
    """R2U-Net (Alom 2018): LeeJunHyun/Image_Segmentation."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.ModuleList(Recurrent(wide) for wide in (32, 16, 8))

    def skip(self, number: int, map_: Tensor, below: Tensor) -> Tensor:
        return map_ + self.recurrent[number](map_)


class RSU(nn.Module):
    """A U in a block, pooling with ceil_mode: xuebinqin/U-2-Net."""

    def __init__(self, wide: int, mid: int, out: int, deep: int) -> None:
        super().__init__()
        self.inside = conv(wide, out)
        self.down = nn.ModuleList(conv(out if not n else mid, mid) for n in range(deep))
        self.far = conv(mid, mid, dilation=2)
        self.up = nn.ModuleList(conv(2 * mid, mid if n else out) for n in range(deep))
        self.pool = nn.MaxPool2d(2, stride=2, ceil_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        maps = [self.down[0](x)]
        for down in self.down[1:]:
            maps.append(down(self.pool(maps[-1])))
        y = self.far(maps[-1])
        for up, map_ in zip(reversed(self.up), reversed(maps), strict=True):
            y = up(torch.cat([resized(y, map_), map_], 1))
        return x + y


class U2Net(nn.Module):
    """U²-Net (Qin 2020), with side outputs that are fused."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = RSU(BANDS, 8, 16, 4), RSU(16, 8, 16, 3), RSU(16, 8, 16, 2)
        self.back_two, self.back_one = RSU(32, 8, 16, 3), RSU(32, 8, 16, 4)
        self.side = nn.ModuleList(nn.Conv2d(16, CLASSES, 3, padding=1) for _ in range(3))
        self.fuse = nn.Conv2d(3 * CLASSES, CLASSES, 1)
        self.pool = nn.MaxPool2d(2, stride=2, ceil_mode=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = self.one(x)
        b = self.two(self.pool(a))
        c = self.three(self.pool(b))
        d = self.back_two(torch.cat([resized(c, b), b], 1))
        e = self.back_one(torch.cat([resized(d, a), a], 1))
        first, *others = (side(y) for side, y in zip(self.side, (e, d, c), strict=True))
        sides = [first, *(resized(one, first) for one in others)]
        maps = [self.fuse(torch.cat(sides, 1)), *sides]
        return tuple(torch.sigmoid(one) for one in maps)


class NestedUNet(nn.Module):
    """UNet++ with deep supervision: 4uiiurz1/pytorch-nested-unet."""

    def __init__(self) -> None:
        super().__init__()
        wide = 8, 16, 32
        self.pool, self.up = (
            nn.MaxPool2d(2, 2),
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        )
        self.x00, self.x10, self.x20 = twice(BANDS, 8), twice(8, 16), twice(16, 32)
        self.x01, self.x11 = twice(wide[0] + wide[1], 8), twice(wide[1] + wide[2], 16)
        self.x02 = twice(2 * wide[0] + wide[1], 8)
        self.final1, self.final2 = nn.Conv2d(8, CLASSES, 1), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x00 = self.x00(x)
        x10 = self.x10(self.pool(x00))
        x01 = self.x01(torch.cat([x00, self.up(x10)], 1))
        x20 = self.x20(self.pool(x10))
        x11 = self.x11(torch.cat([x10, self.up(x20)], 1))
        x02 = self.x02(torch.cat([x00, x01, self.up(x11)], 1))
        return (self.final1(x01) + self.final2(x02)) / 2


class UNet3Plus(nn.Module):
    """UNet 3+ (Huang 2020): maps of all scales at each scale, pooled with ceil_mode."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = twice(BANDS, 8), twice(8, 16), twice(16, 32)
        self.pool2, self.pool4 = (
            nn.MaxPool2d(2, 2, ceil_mode=True),
            nn.MaxPool2d(4, 4, ceil_mode=True),
        )
        self.to_two = nn.ModuleList(conv(wide, 8) for wide in (8, 16, 32))
        self.to_one = nn.ModuleList(conv(wide, 8) for wide in (8, 24, 32))
        self.join_two, self.join_one = conv(24, 24), conv(24, 24)
        self.head = nn.Conv2d(24, CLASSES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.one(x)
        b = self.two(self.pool2(a))
        c = self.three(self.pool2(b))
        two = [self.pool2(a), b, F.interpolate(c, scale_factor=2, mode="bilinear")]
        d = self.join_two(torch.cat([f(y) for f, y in zip(self.to_two, two, strict=True)], 1))
        one = [a, F.interpolate(d, scale_factor=2.0), F.interpolate(c, scale_factor=(4, 4))]
        e = self.join_one(torch.cat([f(y) for f, y in zip(self.to_one, one, strict=True)], 1))
        return self.head(e)


class NNUNet(nn.Module):
    """Plain nnU-Net: strided convolutions, instance norm, leaky ReLU, deep supervision."""

    def __init__(self) -> None:
        super().__init__()

        def block(wide: int, out: int, stride: int = 1) -> nn.Sequential:
            layers: list[nn.Module] = []
            for number in range(2):
                layers += [
                    nn.Conv2d(out if number else wide, out, 3, 1 if number else stride, 1),
                    nn.InstanceNorm2d(out, eps=1e-5, affine=True),
                    nn.LeakyReLU(0.01, inplace=True),
                ]
            return nn.Sequential(*layers)

        self.down = nn.ModuleList([block(BANDS, 8), block(8, 16, 2), block(16, 32, 2)])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2, bias=False) for w in (16, 8))
        self.back = nn.ModuleList(block(2 * wide, wide) for wide in (16, 8))
        self.heads = nn.ModuleList(nn.Conv2d(wide, CLASSES, 1, bias=False) for wide in (16, 8))

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = []
        for down in self.down:
            x = down(x)
            maps.append(x)
        outs = []
        for number, map_ in enumerate(maps[-2::-1]):
            x = self.back[number](torch.cat((self.up[number](x), map_), dim=1))
            outs.append(self.heads[number](x))
        return outs[::-1]


class DenseLayer(nn.Module):
    """Layer of a dense block."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(
            nn.BatchNorm2d(wide), nn.ReLU(True), nn.Conv2d(wide, 8, 3, padding=1), nn.Dropout2d(0.2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layer(x)], 1)


def center_crop(x: Tensor, height: int, width: int) -> Tensor:
    """The middle of a map."""
    top, left = (x.size(2) - height) // 2, (x.size(3) - width) // 2
    return x[:, :, top : top + height, left : left + width]


class Tiramisu(nn.Module):
    """FC-DenseNet (Jégou 2017): bfortuner/pytorch_tiramisu; it crops enlarged maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(BANDS, 16, 3, padding=1)
        self.down = nn.Sequential(DenseLayer(16), DenseLayer(24))
        self.transit = nn.Sequential(
            nn.BatchNorm2d(32),
            nn.ReLU(True),
            nn.Conv2d(32, 32, 1),
            nn.Dropout2d(0.2),
            nn.MaxPool2d(2),
        )
        self.middle = nn.Sequential(DenseLayer(32), DenseLayer(40))
        self.up = nn.ConvTranspose2d(48, 16, 3, 2)
        self.back = nn.Sequential(DenseLayer(48), nn.Conv2d(56, CLASSES, 1), nn.LogSoftmax(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(self.first(x))
        y = self.up(self.middle(self.transit(skip)))
        y = torch.cat([center_crop(y, skip.size(2), skip.size(3)), skip], 1)
        return self.back(y)
