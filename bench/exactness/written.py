# mypy: disable-error-code="no-any-return"
"""Networks as people write them in repositories of their own, small but true to their parts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.exactness.written_unets import BANDS, CLASSES, conv, resized, twice

WIDE = 16


class SegNet(nn.Module):
    """SegNet (Badrinarayanan 2015): pooling by indices and back."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([twice(BANDS, 8), twice(8, 16)])
        self.up = nn.ModuleList([twice(16, 8), nn.Sequential(conv(8, 8), nn.Conv2d(8, CLASSES, 1))])

    def forward(self, x: Tensor) -> Tensor:
        indices = []
        for down in self.down:
            x, where = F.max_pool2d(down(x), 2, 2, return_indices=True)
            indices.append(where)
        for up in self.up:
            x = up(F.max_unpool2d(x, indices.pop(), [2, 2], [2, 2]))
        return x


class ENetBottleneck(nn.Module):
    """Bottleneck of ENet with PReLU: plain, dilated or of 5 × 1 and 1 × 5."""

    def __init__(self, wide: int, dilation: int = 1, asymmetric: bool = False) -> None:
        super().__init__()
        own = wide // 4
        middle: list[nn.Module] = [nn.Conv2d(own, own, 3, 1, dilation, dilation, bias=False)]
        if asymmetric:
            middle = [
                nn.Conv2d(own, own, (5, 1), padding=(2, 0), bias=False),
                nn.Conv2d(own, own, (1, 5), padding=(0, 2), bias=False),
            ]
        self.branch = nn.Sequential(
            nn.Conv2d(wide, own, 1, bias=False), nn.BatchNorm2d(own), nn.PReLU(), *middle,
            nn.BatchNorm2d(own), nn.PReLU(), nn.Conv2d(own, wide, 1, bias=False),
            nn.BatchNorm2d(wide), nn.PReLU(), nn.Dropout2d(0.1),
        )  # fmt: skip
        self.out = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.branch(x))


class ENet(nn.Module):
    """ENet (Paszke 2016): davidtvs/PyTorch-ENet; with or without pooling by indices."""

    def __init__(self, unpool: bool) -> None:
        super().__init__()
        self.unpool = unpool
        self.initial = nn.Conv2d(BANDS, 16 - BANDS, 3, 2, 1, bias=False)
        self.initial_norm = nn.Sequential(nn.BatchNorm2d(16), nn.PReLU())
        self.down = nn.Sequential(
            nn.Conv2d(16, 32, 2, 2, bias=False), nn.BatchNorm2d(32), nn.PReLU()
        )
        self.stage = nn.Sequential(
            ENetBottleneck(32),
            ENetBottleneck(32, 2),
            ENetBottleneck(32, 1, True),
            ENetBottleneck(32, 4),
        )
        self.narrow = nn.Sequential(nn.Conv2d(32, 16, 1, bias=False), nn.BatchNorm2d(16))
        self.up = nn.ConvTranspose2d(32, 16, 2, 2, bias=False)
        self.full = nn.ConvTranspose2d(16, CLASSES, 3, 2, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.initial_norm(torch.cat((self.initial(x), F.max_pool2d(x, 3, 2, 1)), 1))
        pooled, indices = F.max_pool2d(x, 2, return_indices=True)
        n, c, h, w = pooled.size()
        pooled = torch.cat((pooled, torch.zeros(n, c, h, w, device=x.device, dtype=x.dtype)), 1)
        y = self.stage(F.relu(self.down(x) + pooled))
        main = self.narrow(y)
        main = (
            F.max_unpool2d(main, indices, [2, 2])
            if self.unpool
            else F.interpolate(main, scale_factor=2)
        )
        return self.full(F.relu(self.up(y) + main))


class ERFNetBlock(nn.Module):
    """Non-bottleneck-1D of ERFNet: 3 × 1 and 1 × 3."""

    def __init__(self, wide: int, dilated: int) -> None:
        super().__init__()
        self.conv3x1_1 = nn.Conv2d(wide, wide, (3, 1), stride=1, padding=(1, 0), bias=True)
        self.conv1x3_1 = nn.Conv2d(wide, wide, (1, 3), stride=1, padding=(0, 1), bias=True)
        self.bn1 = nn.BatchNorm2d(wide, eps=1e-03)
        self.conv3x1_2 = nn.Conv2d(wide, wide, (3, 1), 1, (dilated, 0), (dilated, 1))
        self.conv1x3_2 = nn.Conv2d(wide, wide, (1, 3), 1, (0, dilated), (1, dilated))
        self.bn2 = nn.BatchNorm2d(wide, eps=1e-03)
        self.dropout = nn.Dropout2d(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv3x1_1(x))
        y = F.relu(self.bn1(self.conv1x3_1(y)))
        y = F.relu(self.conv3x1_2(y))
        y = self.bn2(self.conv1x3_2(y))
        if self.dropout.p != 0:
            y = self.dropout(y)
        return F.relu(y + x)


class ERFNet(nn.Module):
    """ERFNet (Romera 2017): Eromera/erfnet_pytorch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(BANDS, 16 - BANDS, 3, 2, 1)
        self.second = nn.Conv2d(16, 16, 3, 2, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(wide, eps=1e-3) for wide in (16, 32))
        self.blocks = nn.Sequential(*(ERFNetBlock(32, dilated) for dilated in (1, 2, 4)))
        self.up = nn.ConvTranspose2d(32, 16, 3, 2, 1, output_padding=1)
        self.back, self.head = ERFNetBlock(16, 1), nn.ConvTranspose2d(16, CLASSES, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](torch.cat([self.first(x), F.max_pool2d(x, 2, 2)], 1)))
        x = F.relu(self.norms[1](torch.cat([self.second(x), F.max_pool2d(x, 2, 2)], 1)))
        return self.head(self.back(F.relu(self.up(self.blocks(x)))))


class LinkNet(nn.Module):
    """LinkNet (Chaurasia 2017) of D-LinkNet's code, with its dilated centre."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(BANDS, 8, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.down = nn.ModuleList([conv(8, 16, 3, 2), conv(16, 32, 3, 2)])
        self.dilated = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=d, dilation=d) for d in (1, 2, 4))
        self.up = nn.ModuleList(
            nn.Sequential(
                conv(wide, wide // 4, 1),
                nn.ConvTranspose2d(wide // 4, wide // 4, 3, 2, 1, output_padding=1),
                nn.BatchNorm2d(wide // 4), nn.ReLU(inplace=True), conv(wide // 4, wide // 2, 1),
            )
            for wide in (32, 16)
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(inplace=True), nn.ConvTranspose2d(8, CLASSES, 2, 2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        a = self.stem(x)
        b = self.down[0](a)
        c = y = self.down[1](b)
        for dilated in self.dilated:
            y = F.relu(dilated(y))
            c = c + y
        d = self.up[0](c) + b
        return torch.sigmoid(self.head(self.up[1](d) + a))


class BiSeNet(nn.Module):
    """BiSeNet (Yu 2018): CoinCheung/BiSeNet; two paths, refined and fused by averages."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = nn.Sequential(conv(BANDS, 16, 7, 2), conv(16, 16, 3, 2), conv(16, 16, 3, 2))
        self.context = nn.Sequential(conv(BANDS, 16, 3, 4), conv(16, 16, 3, 2), conv(16, 16, 3, 2))
        self.refine = nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16))
        self.tail, self.fuse = conv(16, 16, 1), conv(32, 16, 1)
        self.gate = nn.ModuleList([nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)])
        self.head = nn.Sequential(conv(16, 16), nn.Conv2d(16, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        low = self.context(x)
        average = self.tail(torch.mean(low, dim=(2, 3), keepdim=True))
        average = F.interpolate(average, low.size()[2:], mode="nearest")
        gate = torch.sigmoid(self.refine(F.avg_pool2d(low, low.size()[2:])))
        low = F.interpolate(torch.mul(low, gate) + average, scale_factor=2.0, mode="nearest")
        joint = self.fuse(torch.cat([self.spatial(x), low], dim=1))
        weight = F.adaptive_avg_pool2d(joint, 1)
        weight = torch.sigmoid(self.gate[1](F.relu(self.gate[0](weight))))
        return resized(self.head(joint * weight + joint), x)


class ICNet(nn.Module):
    """ICNet (Zhao 2018): the image at three scales, of which lower ones are added."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(conv(BANDS, 8, 3, 2), conv(8, 8, 3, 2), conv(8, 16, 3, 2))
        self.coarse = nn.Sequential(conv(BANDS, 8, 3, 2), conv(8, 16, 3, 2))
        self.deep = nn.Sequential(conv(16, 16, 3, 2), conv(16, 16, dilation=2))
        self.low = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=2, dilation=2) for _ in range(2))
        self.high = nn.ModuleList(nn.Conv2d(16, 16, 1, bias=False) for _ in range(2))
        self.head = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        half = self.coarse(F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=True))
        quarter = self.deep(half)
        y = quarter + F.interpolate(
            F.adaptive_avg_pool2d(quarter, 2),
            quarter.size()[2:],
            mode="bilinear",
            align_corners=True,
        )
        for low, high, map_ in zip(self.low, self.high, (half, self.fine(x)), strict=True):
            y = F.interpolate(y, size=map_.shape[2:], mode="bilinear", align_corners=True)
            y = F.relu(low(y) + high(map_))
        y = F.interpolate(self.head(y), scale_factor=2, mode="bilinear", align_corners=True)
        return F.interpolate(y, scale_factor=4, mode="bilinear", align_corners=True)


class FastSCNN(nn.Module):
    """Fast-SCNN (Poudel 2019): Tramac/Fast-SCNN-pytorch, with its pyramid of averages."""

    def __init__(self) -> None:
        super().__init__()

        def apart(wide: int, out: int, stride: int = 1) -> nn.Sequential:
            deep = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
            return nn.Sequential(deep, nn.BatchNorm2d(wide), nn.ReLU(True), conv(wide, out, 1))

        self.learn = nn.Sequential(
            nn.Conv2d(BANDS, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
            apart(8, 16, 2), apart(16, 16, 2),
        )  # fmt: skip
        self.deep = nn.Sequential(apart(16, 32, 2), apart(32, 32, 2))
        self.bins = nn.ModuleList(conv(32, 8, 1) for _ in range(4))
        self.out, self.low = conv(64, 16, 1), apart(16, 16)
        self.high = nn.Conv2d(16, 16, 1)
        self.head = nn.Sequential(apart(16, 16), nn.Dropout(0.1), nn.Conv2d(16, CLASSES, 1))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        size = x.size()[2:]
        high = self.learn(x)
        y = self.deep(high)
        maps = [y]
        for bins, one in zip((1, 2, 3, 6), self.bins, strict=True):
            pooled = one(nn.AdaptiveAvgPool2d(bins)(y))
            maps.append(F.interpolate(pooled, y.size()[2:], mode="bilinear", align_corners=True))
        low = self.out(torch.cat(maps, dim=1))
        low = F.interpolate(low, size=high.size()[2:], mode="bilinear", align_corners=True)
        y = F.relu(self.high(high) + self.low(low))
        return (F.interpolate(self.head(y), size, mode="bilinear", align_corners=True),)


class ESP(nn.Module):
    """Pyramid of dilated convolutions that are added step by step: sacmehta/ESPNet."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        own = out // 4
        self.c1 = nn.Conv2d(wide, own, 3, 2, 1, bias=False)
        self.d = nn.ModuleList(
            nn.Conv2d(own, own, (3, 3), padding=(d, d), dilation=(d, d), bias=False)
            for d in (1, 2, 4, 8)
        )
        self.bn, self.act = nn.BatchNorm2d(out, eps=1e-3), nn.PReLU(out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c1(x)
        first, *others = (one(x) for one in self.d)
        sums = [others[0]]
        for other in others[1:]:
            sums.append(sums[-1] + other)
        return self.act(self.bn(torch.cat([first, *sums], 1)))


class ESPNet(nn.Module):
    """ESPNet (Mehta 2018), with the pooled image at each scale."""

    def __init__(self) -> None:
        super().__init__()
        self.level1, self.level2 = conv(BANDS, 16, 3, 2), ESP(16 + BANDS, 32)
        self.pool = nn.AvgPool2d(3, stride=2, padding=1)
        self.b = nn.Sequential(nn.BatchNorm2d(32 + BANDS), nn.PReLU(32 + BANDS))
        self.up = nn.ConvTranspose2d(
            32 + BANDS, 16, 2, stride=2, padding=0, output_padding=0, bias=False
        )
        self.head = nn.ConvTranspose2d(32, CLASSES, 2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        half = self.pool(x)
        one = self.level1(x)
        two = self.b(torch.cat([self.level2(torch.cat([one, half], 1)), self.pool(half)], 1))
        return self.head(torch.cat([self.up(two), one], 1))


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """As in torchvision's ShuffleNet."""
    b, c, h, w = x.size()
    x = x.view(b, groups, c // groups, h, w)
    return torch.transpose(x, 1, 2).contiguous().view(b, c, h, w)


class ShuffleBlock(nn.Module):
    """Block of ShuffleNet V2: chunk, convolve one half, concatenate, shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            conv(8, 8, 1), nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.BatchNorm2d(8), conv(8, 8, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=1)
        return channel_shuffle(torch.cat((x1, self.branch(x2)), dim=1), 2)


class SplitBlock(nn.Module):
    """SS-nbt of LEDNet: halves through 3 × 1 and 1 × 3, then a shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(
            nn.Conv2d(8, 8, (3, 1), padding=(1, 0)),
            nn.ReLU(True),
            nn.Conv2d(8, 8, (1, 3), padding=(0, 1)),
        )
        self.right = nn.Sequential(
            nn.Conv2d(8, 8, (1, 3), padding=(0, 1)),
            nn.ReLU(True),
            nn.Conv2d(8, 8, (3, 1), padding=(1, 0)),
        )

    def forward(self, x: Tensor) -> Tensor:
        middle = x.shape[1] // 2
        y = torch.cat((self.left(x[:, :middle, :, :]), self.right(x[:, middle:, :, :])), 1)
        return channel_shuffle(F.relu(x + y, inplace=True), 2)


class GRNBlock(nn.Module):
    """Block of ConvNeXt V2: facebookresearch/ConvNeXt-V2."""

    def __init__(self) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(WIDE, WIDE, 7, padding=3, groups=WIDE)
        self.norm = nn.LayerNorm(WIDE, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)
        self.gamma = nn.Parameter(torch.full((1, 1, 1, 4 * WIDE), 0.3))
        self.beta = nn.Parameter(torch.full((1, 1, 1, 4 * WIDE), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = F.gelu(self.pwconv1(y))
        size = torch.norm(y, p=2, dim=(1, 2), keepdim=True)
        y = self.gamma * (y * (size / (size.mean(dim=-1, keepdim=True) + 1e-6))) + self.beta + y
        return x + self.pwconv2(y).permute(0, 3, 1, 2)


class NAFBlock(nn.Module):
    """Block of NAFNet: layer norm of channels by hand, halves that are multiplied, squeeze."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDE)), nn.Parameter(torch.zeros(WIDE))
        self.conv1 = nn.Conv2d(WIDE, 2 * WIDE, 1)
        self.conv2 = nn.Conv2d(2 * WIDE, 2 * WIDE, 3, padding=1, groups=2 * WIDE)
        self.conv3, self.sca = nn.Conv2d(WIDE, WIDE, 1), nn.Conv2d(WIDE, WIDE, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.beta = nn.Parameter(torch.full((1, WIDE, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        y = (x - mean) / (variance + 1e-6).sqrt()
        y = self.weight.view(1, -1, 1, 1) * y + self.bias.view(1, -1, 1, 1)
        first, second = self.conv2(self.conv1(y)).chunk(2, dim=1)
        y = first * second
        y = y * self.sca(self.pool(y))
        return x + self.conv3(y) * self.beta


class GLUBlock(nn.Module):
    """A gated linear unit over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDE, 2 * WIDE, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.glu(self.conv(x), dim=1)


class ReplicateBlock(nn.Module):
    """Convolutions with replicated edges."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(WIDE, WIDE, 3, padding=1, padding_mode="replicate")
        self.conv2 = nn.Sequential(nn.ReplicationPad2d(1), nn.Conv2d(WIDE, WIDE, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(x)))


class FourierBlock(nn.Module):
    """Spectral transform of fast Fourier convolutions: LaMa."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(2 * WIDE, 2 * WIDE, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        far = torch.fft.rfftn(x, dim=(-2, -1), norm="ortho")
        y = self.conv(torch.cat([far.real, far.imag], 1))
        real, imaginary = y.chunk(2, 1)
        return x + torch.fft.irfftn(
            torch.complex(real, imaginary), s=(h, w), dim=(-2, -1), norm="ortho"
        )


BLOCKS: dict[str, Any] = {
    "shuffle": ShuffleBlock, "split": SplitBlock, "grn": GRNBlock, "naf": NAFBlock,
    "glu": GLUBlock, "replicate": ReplicateBlock, "fourier": FourierBlock,
}  # fmt: skip


class Blocks(nn.Module):
    """A stem by 2, two blocks, and a head that enlarges by shuffling pixels or by bilinear."""

    def __init__(self, block: str, shuffled: bool = False) -> None:
        super().__init__()
        self.stem = conv(BANDS, WIDE, 3, 2)
        self.blocks = nn.Sequential(BLOCKS[block](), BLOCKS[block]())
        self.head = nn.Sequential(
            nn.Conv2d(WIDE, CLASSES, 1), nn.Upsample(scale_factor=2, mode="bilinear")
        )
        if shuffled:
            self.head = nn.Sequential(
                nn.Conv2d(WIDE, 4 * CLASSES, 3, padding=1), nn.PixelShuffle(2)
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))
