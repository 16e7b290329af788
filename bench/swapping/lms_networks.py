"""The kinds of network that articles on Large Model Support train, and our U-Net; all small.

Of the articles' structure, with as few channels as asked for. Each consists of groups, modules that
run one behind the other, so that a group can be kept, recomputed or swapped. The loss is inside, or
its maps, as large as the image, would be left out of whatever is done to the network.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tilenet.geometry.layers import Conv, Join, Pool, Stash, Upsample
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.model.network import build_network

__all__ = ["KINDS", "CellNetwork", "Kind", "labels_of"]

CLASSES = 4


class CellNetwork(nn.Module):
    """Images and labels to a loss.

    Attributes:
        checkpointing: Whether each group keeps its inputs only, and is recomputed in backward.
        groups: All but the loss.
        loss: The last group.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checkpointing = False
        self.groups = nn.ModuleList()
        self.loss = nn.CrossEntropyLoss()

    def group(self, *modules: nn.Module) -> nn.Module:
        """Add a group."""
        made = modules[0] if len(modules) == 1 else nn.Sequential(*modules)
        self.groups.append(made)
        return made

    def run(self, group: nn.Module, *tensors: Tensor) -> Tensor:
        """What a group makes of tensors."""
        made: Tensor = (
            checkpoint(group, *tensors, use_reentrant=False)
            if self.checkpointing
            else group(*tensors)
        )
        return made

    def scores(self, images: Tensor) -> Tensor:
        """(B, CLASSES) or, for each pixel, (B, CLASSES, ...)."""
        for group in self.groups:
            images = self.run(group, images)
        return images

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.loss(self.scores(images), labels)
        return found


def _conv(wide: int, out: int, kernel: int = 1, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    padding = dilation * (kernel // 2)
    return nn.Conv2d(wide, out, kernel, stride, padding, dilation, bias=False)


def _normed(convolution: nn.Conv2d) -> list[nn.Module]:
    return [convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU(inplace=True)]


class Bottleneck(nn.Module):
    """ResNet's block: 1 × 1, 3 × 3, 1 × 1, around which the input is added."""

    def __init__(self, wide: int, middle: int, stride: int, dilation: int) -> None:
        super().__init__()
        out = 4 * middle
        self.inner = nn.Sequential(
            *_normed(_conv(wide, middle)),
            *_normed(_conv(middle, middle, 3, stride, dilation)),
            *_normed(_conv(middle, out))[:2],
        )
        same = wide == out and stride == 1
        self.around = (
            nn.Identity() if same else nn.Sequential(*_normed(_conv(wide, out, stride=stride))[:2])
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x).add_(self.around(x)), inplace=True)


class ResNet(CellNetwork):
    """A classifier of bottlenecks with batch norm.

    Args:
        width: Channels of the stem; ResNet-50's are 64.
        blocks: Of each of four stages; ResNet-50's are 3, 4, 6, 3.
        dilated: Keep the last stage's resolution, and widen its kernels instead.
    """

    def __init__(self, width: int, blocks: tuple[int, ...], dilated: bool = False) -> None:
        super().__init__()
        self.group(*_normed(_conv(3, width, 7, 2)), nn.MaxPool2d(3, 2, 1))
        self.wide = width
        for stage, count in enumerate(blocks):
            whole = stage == 0 or (dilated and stage == len(blocks) - 1)
            dilation = 2 if dilated and stage == len(blocks) - 1 else 1
            for block in range(count):
                stride = 1 if whole or block else 2
                self.group(Bottleneck(self.wide, width << stage, stride, dilation))
                self.wide = 4 * width << stage
        self.head()

    def head(self) -> None:
        """Add what follows the last stage."""
        self.group(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(self.wide, CLASSES))


class SpatialPyramid(nn.Module):
    """ASPP: the same map seen at four rates, and its mean, side by side."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.seen = nn.ModuleList(
            nn.Sequential(*_normed(_conv(wide, out, 1 if rate == 1 else 3, dilation=rate)))
            for rate in (1, 6, 12, 18)
        )
        # No norm: a batch of one image has one value per channel here.
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, out, 1), nn.ReLU())
        self.joined = nn.Sequential(*_normed(_conv(5 * out, out)))

    def forward(self, x: Tensor) -> Tensor:
        maps = [module(x) for module in self.seen]
        joined: Tensor = self.joined(torch.cat([*maps, self.mean(x).expand_as(maps[0])], 1))
        return joined


class Beside(nn.Module):
    """DeepLabv3+'s decoder: the deep map, enlarged, beside the low-level one, fewer channels."""

    def __init__(self, wide: int, low: int, few: int) -> None:
        super().__init__()
        self.fewer = nn.Sequential(*_normed(_conv(low, few)))
        self.joined = nn.Sequential(*_normed(_conv(wide + few, wide, 3)))

    def forward(self, x: Tensor, low: Tensor) -> Tensor:
        x = F.interpolate(x, low.shape[2:], mode="bilinear", align_corners=False)
        joined: Tensor = self.joined(torch.cat((x, self.fewer(low)), 1))
        return joined


class DeepLab(ResNet):
    """As DeepLabv3+, of output stride 16; arguments as of `ResNet`."""

    def __init__(self, width: int, blocks: tuple[int, ...]) -> None:
        self._low_at = blocks[0]  # the group whose result the decoder gets: the first stage's last
        super().__init__(width, blocks, dilated=True)

    def head(self) -> None:
        width = self.groups[0][0].out_channels  # type: ignore[index]
        wide = 4 * width  # 256 where the stem has 64
        self.group(SpatialPyramid(self.wide, wide))
        self.group(Beside(wide, 4 * width, max(1, 3 * width // 4)))
        self.group(*_normed(_conv(wide, wide, 3)))
        self.group(
            nn.Conv2d(wide, CLASSES, 1),
            nn.Upsample(scale_factor=4, mode="bilinear", align_corners=False),
        )

    def scores(self, images: Tensor) -> Tensor:
        *body, beside, last, out = self.groups
        x = low = images
        for number, group in enumerate(body):
            x = self.run(group, x)
            low = x if number == self._low_at else low
        x = self.run(last, self.run(beside, x, low))
        return self.run(out, x)


class UNet3d(CellNetwork):
    """A 3-D U-Net of three levels, two convolutions with instance norm in each."""

    def __init__(self, width: int, levels: int = 3) -> None:
        super().__init__()
        channels = 1
        for level in range(levels):
            self._two(channels, width << level, pooled=level > 0)
            channels = width << level
        for level in reversed(range(levels - 1)):
            self._two(channels + (width << level), width << level)
            channels = width << level
        self.group(nn.Conv3d(channels, CLASSES, 1))
        self._levels = levels

    def _two(self, wide: int, out: int, pooled: bool = False) -> None:
        modules: list[nn.Module] = [nn.MaxPool3d(2)] if pooled else []
        for channels in (wide, out):
            modules.append(nn.Conv3d(channels, out, 3, padding=1, bias=False))
            modules += [nn.InstanceNorm3d(out), nn.LeakyReLU(0.01, inplace=True)]
        self.group(*modules)

    def scores(self, images: Tensor) -> Tensor:
        down, (*up, last) = self.groups[: self._levels], self.groups[self._levels :]
        skips, x = [], images
        for group in down:
            x = self.run(group, x)
            skips.append(x)
        del skips[-1]
        for group in up:
            x = torch.cat((F.interpolate(x, scale_factor=2.0), skips.pop()), 1)
            x = self.run(group, x)
        return self.run(last, x)


class OurUNet(CellNetwork):
    """tilenet's own, as layers; a group is a convolution with its norm and activation."""

    def __init__(self, width: int, poolings: int, convolutions: int) -> None:
        super().__init__()
        layers = unet_layers(
            UNetOptions(poolings, convolutions, width, bands=3, classes=CLASSES, norm="instance")
        )
        group: list[nn.Module] = []
        for layer, module in zip(layers, build_network(layers), strict=True):
            # What is stashed or handed on stays out of recomputation.
            alone = isinstance(layer, Pool | Stash | Join | Upsample)
            if group and (alone or isinstance(layer, Conv)):
                self.group(*group)
                group = []
            group.append(module)
        self.group(*group)

    def run(self, group: nn.Module, *tensors: Tensor) -> Tensor:
        if isinstance(group, nn.Sequential | nn.Conv2d):
            return super().run(group, *tensors)
        made: Tensor = group(*tensors)
        return made


@dataclass(frozen=True)
class Kind:
    """A kind of network.

    Attributes:
        build: Makes it, from the channels that it begins with.
        unit: Its images' sides are multiples, in pixels.
        dimensions: Of an image.
        bands: Of an image.
        per_image: Whether an image has one label; else each pixel has.
        articles: Times the pixels that IBM's articles trained it with.
    """

    build: Callable[[int], CellNetwork]
    unit: int
    dimensions: int = 2
    bands: int = 3
    per_image: bool = False
    articles: float | None = None


KINDS = {
    "deeplab": Kind(lambda width: DeepLab(width, (3, 4, 6, 3)), 16, articles=(3200 / 1400) ** 2),
    "unet-3d": Kind(UNet3d, 4, dimensions=3, bands=1, articles=5),
    "resnet": Kind(lambda width: ResNet(width, (3, 4, 6, 3)), 16, per_image=True, articles=10),
    "unet": Kind(lambda width: OurUNet(width, 4, 2), 16),
    "unet-5": Kind(lambda width: OurUNet(width, 4, 5), 16),
}


def labels_of(kind: Kind, batch: int, side: int) -> Tensor:
    """Random labels of a batch, int64."""
    shape = (batch,) if kind.per_image else (batch, *(side,) * kind.dimensions)
    return torch.randint(0, CLASSES, shape)
