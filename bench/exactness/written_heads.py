# mypy: disable-error-code="no-any-return"
"""Decoders, pyramids and generators as people write them, small but true to their parts."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.exactness.written_unets import BANDS, CLASSES, conv, resized, twice

WIDE = 16


class Backbone(nn.Module):
    """Maps at strides of 2, 4 and 8."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(conv(wide, WIDE, 3, 2) for wide in (BANDS, WIDE, WIDE))

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


class SharedHead(nn.Module):
    """A feature pyramid whose levels run through one head with the same weights, as RetinaNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.lateral = nn.ModuleList(nn.Conv2d(WIDE, WIDE, 1) for _ in range(3))
        self.head = nn.Sequential(conv(WIDE, WIDE), nn.Conv2d(WIDE, CLASSES, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        fine, middle, coarse = (
            one(y) for one, y in zip(self.lateral, self.backbone(x), strict=True)
        )
        middle = middle + F.interpolate(coarse, size=middle.shape[-2:], mode="nearest")
        fine = fine + F.interpolate(middle, size=fine.shape[-2:], mode="nearest")
        return torch.stack([resized(self.head(y), x) for y in (fine, middle, coarse)]).mean(0)


class SharedScales(nn.Module):
    """One network on the image at two scales, weighed by a map: attention to scale (Chen 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Conv2d(WIDE, CLASSES, 1)
        self.weigh = nn.Sequential(conv(2 * WIDE, WIDE), nn.Conv2d(WIDE, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        large = self.backbone(x)[-1]
        small = self.backbone(F.interpolate(x, scale_factor=0.5, mode="bilinear"))[-1]
        small = resized(small, large)
        weights = F.softmax(self.weigh(torch.cat([large, small], 1)), dim=1)
        y = self.head(large) * weights[:, 0:1] + self.head(small) * weights[:, 1:2]
        return resized(y, x)


class CoordConvNet(nn.Module):
    """Two channels of coordinates next to the image's: walsvid/CoordConv."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = twice(BANDS + 2, WIDE)
        self.head = nn.Conv2d(WIDE, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        rows = torch.linspace(-1, 1, h, dtype=x.dtype, device=x.device).view(1, 1, h, 1)
        columns = torch.linspace(-1, 1, w, dtype=x.dtype, device=x.device).view(1, 1, 1, w)
        x = torch.cat([x, rows.expand(b, 1, h, w), columns.expand(b, 1, h, w)], 1)
        return self.head(self.conv(x))


class HED(nn.Module):
    """Holistically nested edges (Xie 2015): sniklaus/pytorch-hed; side outputs that are fused."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.tensor([104.0, 116.7, 122.7, 110.0]).view(1, 4, 1, 1))
        self.stages = nn.ModuleList(
            nn.Sequential(
                *([nn.MaxPool2d(2, 2)] if number else []),
                nn.Conv2d(WIDE if number else BANDS, WIDE, 3, padding=1), nn.ReLU(),
                nn.Conv2d(WIDE, WIDE, 3, padding=1), nn.ReLU(),
            )
            for number in range(4)
        )  # fmt: skip
        self.score = nn.ModuleList(nn.Conv2d(WIDE, 1, 1) for _ in range(4))
        self.combine = nn.Sequential(nn.Conv2d(4, 1, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2], x.shape[3]
        sides: list[Tensor] = []
        y = x * 255.0 - self.mean
        for stage, score in zip(self.stages, self.score, strict=True):
            y = stage(y)
            sides.append(F.interpolate(score(y), size=size, mode="bilinear", align_corners=False))
        return self.combine(torch.cat(sides, 1))


class DenseASPP(nn.Module):
    """DenseASPP (Yang 2018): dilated branches, each of all maps before it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.branches = nn.ModuleList(
            nn.Sequential(conv(WIDE + 8 * n, 16, 1), conv(16, 8, dilation=d), nn.Dropout2d(0.1))
            for n, d in enumerate((3, 6, 12, 18))
        )
        self.head = nn.Sequential(
            nn.Conv2d(WIDE + 32, CLASSES, 1), nn.Upsample(scale_factor=8, mode="bilinear")
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.backbone(x)[-1]
        for branch in self.branches:
            y = torch.cat((branch(y), y), dim=1)
        return self.head(y)


class ReverseAttention(nn.Module):
    """Gates of 1 - sigmoid, as in PraNet (Fan 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.coarse = Backbone(), nn.Conv2d(WIDE, 1, 1)
        self.refine = nn.ModuleList(
            nn.Sequential(conv(WIDE, WIDE), nn.Conv2d(WIDE, 1, 1)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        fine, middle, deep = self.backbone(x)
        outs = [self.coarse(deep)]
        for refine, map_ in zip(self.refine, (middle, fine), strict=True):
            crop = F.interpolate(outs[-1], scale_factor=2, mode="bilinear")
            reverse = -1 * (torch.sigmoid(crop)) + 1
            outs.append(refine(reverse.expand(-1, WIDE, -1, -1).mul(map_)) + crop)
        return tuple(resized(one, x) for one in reversed(outs))


class GatedShape(nn.Module):
    """Two outputs that are mixed by a gate and 1 - gate."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.gate, self.head = nn.Conv2d(2 * WIDE, 1, 1), nn.Conv2d(WIDE, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine, middle, _ = self.backbone(x)
        middle = resized(middle, fine)
        gate = torch.sigmoid(self.gate(torch.cat([fine, middle], 1)))
        return resized(self.head(gate * fine + (1 - gate) * middle), x)


class Generator(nn.Module):
    """CycleGAN's generator: reflected edges, instance norm, tanh; or with replicated edges."""

    def __init__(self, pad: str = "reflect") -> None:
        super().__init__()
        edge = nn.ReflectionPad2d if pad == "reflect" else nn.ReplicationPad2d
        norm = nn.InstanceNorm2d
        self.down = nn.Sequential(
            edge(3), nn.Conv2d(BANDS, 8, 7), norm(8), nn.ReLU(True),
            nn.Conv2d(8, WIDE, 3, 2, 1), norm(WIDE), nn.ReLU(True),
        )  # fmt: skip
        self.block = nn.Sequential(
            edge(1), nn.Conv2d(WIDE, WIDE, 3), norm(WIDE), nn.ReLU(True),
            edge(1), nn.Conv2d(WIDE, WIDE, 3), norm(WIDE),
        )  # fmt: skip
        self.up = nn.Sequential(
            nn.ConvTranspose2d(WIDE, 8, 3, 2, 1, output_padding=1), norm(8), nn.ReLU(True),
            edge(3), nn.Conv2d(8, CLASSES, 7), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.up(x + self.block(x))


class FCN8s(nn.Module):
    """FCN-8s (Long 2015): wkentaro/pytorch-fcn; padding by 100, and crops."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(wide, WIDE, 3, padding=pad), nn.ReLU(inplace=True),
                nn.MaxPool2d(2, stride=2, ceil_mode=True),
            )
            for wide, pad in ((BANDS, 100), (WIDE, 1), (WIDE, 1), (WIDE, 1), (WIDE, 1))
        )  # fmt: skip
        self.fc = nn.Sequential(nn.Conv2d(WIDE, 32, 7), nn.ReLU(inplace=True), nn.Dropout2d())
        self.score = nn.ModuleList(nn.Conv2d(wide, CLASSES, 1) for wide in (32, WIDE, WIDE))
        self.upscore2 = nn.ConvTranspose2d(CLASSES, CLASSES, 4, stride=2, bias=False)
        self.upscore_pool4 = nn.ConvTranspose2d(CLASSES, CLASSES, 4, stride=2, bias=False)
        self.upscore8 = nn.ConvTranspose2d(CLASSES, CLASSES, 16, stride=8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h, pools = x, []
        for stage in self.stages:
            h = stage(h)
            pools.append(h)
        h = self.upscore2(self.score[0](self.fc(h)))
        side = self.score[1](pools[3] * 0.01)
        h = h + side[:, :, 5 : 5 + h.size()[2], 5 : 5 + h.size()[3]]
        h = self.upscore_pool4(h)
        side = self.score[2](pools[2] * 0.0001)
        h = h + side[:, :, 9 : 9 + h.size()[2], 9 : 9 + h.size()[3]]
        h = self.upscore8(h)
        return h[:, :, 31 : 31 + x.size()[2], 31 : 31 + x.size()[3]].contiguous()


class LargeKernels(nn.Module):
    """Global convolutional network (Peng 2017): k × 1 and 1 × k, and residual refinement."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.left = nn.ModuleList(self.pair((7, 1), (1, 7)) for _ in range(2))
        self.right = nn.ModuleList(self.pair((1, 7), (7, 1)) for _ in range(2))
        self.refine = nn.Sequential(
            nn.Conv2d(CLASSES, CLASSES, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(CLASSES, CLASSES, 3, padding=1),
        )  # fmt: skip

    @staticmethod
    def pair(*kernels: tuple[int, int]) -> nn.Sequential:
        first, second = kernels
        around = [(one[0] // 2, one[1] // 2) for one in kernels]
        return nn.Sequential(
            nn.Conv2d(WIDE, CLASSES, first, padding=around[0]),
            nn.Conv2d(CLASSES, CLASSES, second, padding=around[1]),
        )

    def forward(self, x: Tensor) -> Tensor:
        _, middle, deep = self.backbone(x)
        pairs = zip(self.left, self.right, (deep, middle), strict=True)
        maps = [left(y) + right(y) for left, right, y in pairs]
        y = F.interpolate(maps[0], maps[1].size()[2:], mode="bilinear") + maps[1]
        y = y + self.refine(y)
        return F.interpolate(y, x.size()[2:], mode="bilinear")


class RefineNet(nn.Module):
    """Light RefineNet (Nekrasov 2018): chained residual pooling by 5 with stride 1."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.adapt = nn.ModuleList(nn.Conv2d(WIDE, WIDE, 1, bias=False) for _ in range(3))
        self.chain = nn.ModuleList(nn.Conv2d(WIDE, WIDE, 1, bias=False) for _ in range(3))
        self.pool = nn.MaxPool2d(kernel_size=5, stride=1, padding=2)
        self.head = nn.Conv2d(WIDE, CLASSES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor | None = None
        for number, map_ in enumerate(reversed(self.backbone(x))):
            own = self.adapt[number](map_)
            if y is not None:
                own = own + nn.Upsample(size=own.size()[2:], mode="bilinear", align_corners=True)(y)
            y = top = F.relu(own)
            top = self.chain[number](self.pool(top))
            y = top + y
        out: Tensor = self.head(y)
        return F.interpolate(out, scale_factor=2, mode="bilinear")


class Focus(nn.Module):
    """Every other pixel, stacked (YOLOv5's Focus), or differences of these (Haar's wavelet)."""

    def __init__(self, wavelet: bool = False) -> None:
        super().__init__()
        self.wavelet = wavelet
        self.conv, self.head = twice(4 * BANDS, WIDE), nn.ConvTranspose2d(WIDE, CLASSES, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x[:, :, 0::2, 0::2], x[:, :, 1::2, 0::2]
        c, d = x[:, :, 0::2, 1::2], x[:, :, 1::2, 1::2]
        maps = [a, b, c, d]
        if self.wavelet:
            maps = [a + b + c + d, -a - b + c + d, -a + b - c + d, a - b - c + d]
        return self.head(self.conv(torch.cat(maps, 1)))


class BlurPooled(nn.Module):
    """Anti-aliased pooling: adobe/antialiased-cnns; a fixed kernel after reflected edges."""

    def __init__(self) -> None:
        super().__init__()
        row = torch.tensor([1.0, 2.0, 1.0])
        kernel = row[:, None] * row[None, :]
        self.register_buffer("filt", (kernel / kernel.sum())[None, None].repeat(WIDE, 1, 1, 1))
        self.stem, self.pad = conv(BANDS, WIDE), nn.ReflectionPad2d(1)
        self.pool = nn.MaxPool2d(2, stride=1)
        self.body = conv(WIDE, WIDE)
        self.head = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(WIDE, CLASSES, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.pad(self.pool(self.stem(x)))
        x = F.conv2d(x, self.filt, stride=2, groups=x.shape[1])  # type: ignore[arg-type]
        x = F.pad(x, [0, 0, 0, 0])
        return self.head(self.body(x))


class SameConv(nn.Conv2d):
    """Padding as TensorFlow's, of the map's size: lukemelas/EfficientNet-PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        (h, w), (kh, kw), (sh, sw) = x.size()[-2:], self.weight.size()[-2:], self.stride
        tall = max((math.ceil(h / sh) - 1) * sh + kh - h, 0)
        wide = max((math.ceil(w / sw) - 1) * sw + kw - w, 0)
        if tall > 0 or wide > 0:
            x = F.pad(x, [wide // 2, wide - wide // 2, tall // 2, tall - tall // 2])
        return F.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class SamePadded(nn.Module):
    """A small network of such convolutions and swish."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = SameConv(BANDS, WIDE, 3, 2), SameConv(WIDE, WIDE, 5, 2, groups=WIDE)
        self.head = nn.Conv2d(WIDE, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.deep(x * torch.sigmoid(x))
        return F.interpolate(self.head(x), scale_factor=4, mode="bicubic", align_corners=False)


class STDC(nn.Module):
    """STDC's block (Fan 2021): narrower and narrower maps, concatenated; averages by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(BANDS, WIDE, 3, 2)
        self.convs = nn.ModuleList([conv(WIDE, 8, 1), conv(8, 4), conv(4, 2), conv(2, 2)])
        deep = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8, bias=False)
        self.avd = nn.Sequential(deep, nn.BatchNorm2d(8))
        self.skip, self.head = nn.AvgPool2d(3, stride=2, padding=1), nn.Conv2d(WIDE, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.convs[0](self.stem(x))]
        y = self.avd(maps[0])
        for one in self.convs[1:]:
            y = one(y)
            maps.append(y)
        y = torch.cat([self.skip(maps[0]), *maps[1:]], dim=1)
        return resized(self.head(y), x)


class OCR(nn.Module):
    """Object contextual representations (Yuan 2020): regions are sums over all pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.aux = Backbone(), nn.Conv2d(WIDE, CLASSES, 1)
        self.query, self.key, self.value = (nn.Conv2d(WIDE, 8, 1) for _ in range(3))
        self.back, self.head = conv(8, WIDE, 1), nn.Conv2d(2 * WIDE, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.backbone(x)[-1]
        b, c, h, w = y.shape
        regions = F.softmax(self.aux(y).view(b, CLASSES, -1), dim=2)
        objects = torch.matmul(regions, y.view(b, c, -1).permute(0, 2, 1))
        objects = objects.permute(0, 2, 1).contiguous().unsqueeze(3)
        query = self.query(y).view(b, 8, -1).permute(0, 2, 1)
        pairs = F.softmax(torch.matmul(query, self.key(objects).view(b, 8, -1)) * 8**-0.5, dim=-1)
        context = torch.matmul(pairs, self.value(objects).view(b, 8, -1).permute(0, 2, 1))
        context = self.back(context.permute(0, 2, 1).contiguous().view(b, 8, h, w))
        return resized(self.head(torch.cat([context, y], 1)), x)


class DANet(nn.Module):
    """Attention over pixels and over channels (Fu 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.query, self.key = nn.Conv2d(WIDE, 4, 1), nn.Conv2d(WIDE, 4, 1)
        self.value, self.head = nn.Conv2d(WIDE, WIDE, 1), nn.Conv2d(WIDE, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.backbone(x)[-1]
        b, c, h, w = y.size()
        query = self.query(y).view(b, -1, h * w).permute(0, 2, 1)
        pairs = F.softmax(torch.bmm(query, self.key(y).view(b, -1, h * w)), dim=-1)
        value = self.value(y).view(b, -1, h * w)
        cells = torch.bmm(value, pairs.permute(0, 2, 1)).view(b, c, h, w)
        own = y.view(b, c, -1)
        energy = torch.bmm(own, own.permute(0, 2, 1))
        energy = torch.max(energy, -1, keepdim=True)[0].expand_as(energy) - energy
        channels = torch.bmm(F.softmax(energy, dim=-1), own).view(b, c, h, w)
        return resized(self.head(cells + channels + y), x)


class ChangePair(nn.Module):
    """FC-Siam-diff (Daudt 2018): two dates as bands, the same weights on each, their difference."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = twice(BANDS // 2, 8), twice(8, WIDE)
        self.up, self.back = nn.ConvTranspose2d(WIDE, 8, 2, 2), twice(16, 8)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        before, after = x.chunk(2, 1)
        a, b = self.first(before), self.first(after)
        deep = torch.abs(self.second(F.max_pool2d(a, 2)) - self.second(F.max_pool2d(b, 2)))
        y = self.back(torch.cat([self.up(deep), torch.abs(a - b)], 1))
        return self.head(y)
