"""The networks that IBM's articles on Large Model Support train, PSPNet, and U-Nets of ours.

DeepLabv3+ and PSPNet are those of segmentation_models_pytorch, adopted with frozen batch norm;
ResNet-50 is torchvision's. Their weights are random. Each network consists of groups, modules that
run one behind the other, so that a group can be kept or recomputed. The loss is inside, or
its maps, as large as the image, would be left out of whatever is done to the network.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.exactness.networks import SMP, Choice
from tilenet.adoption.adopt import Adopted, adopt
from tilenet.geometry.layers import (
    Activation,
    Conv,
    GlobalPool,
    Layer,
    Pool,
    Stash,
    TransposedConv,
    Upsample,
)
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.model.network import Network, build_network

__all__ = ["KINDS", "GroupedNetwork", "Kind", "labels_of"]

CLASSES = 4


class GroupedNetwork(nn.Module):
    """Images and labels to a loss.

    Attributes:
        groups: All but the loss.
        recomputes: Whether groups that may are computed again in backward.
        layers: The list that they were built from, if any.
    """

    layers: tuple[Layer, ...] = ()
    recomputes = False

    def __init__(self, groups: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.groups = nn.ModuleList(groups)
        self.loss = nn.CrossEntropyLoss()

    @property
    def again(self) -> list[nn.Module]:
        """Groups that may be computed again."""
        return list(self.groups)

    def scores(self, images: Tensor) -> Tensor:
        """(B, CLASSES) or, for each pixel, (B, CLASSES, ...)."""
        for group in self.groups:
            images = self.run(group, images)
        return images

    def run(self, group: nn.Module, x: Tensor) -> Tensor:
        """The output of one of the groups."""
        again = self.recomputes and any(group is one for one in self.again)
        made: Tensor = checkpoint(group, x, use_reentrant=False) if again else group(x)
        return made

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.scores(images), labels)
        return loss


class ListedNetwork(GroupedNetwork):
    """The network of a list of layers, each group a convolution with what follows it."""

    def __init__(self, layers: tuple[Layer, ...], network: Network) -> None:
        edges = list(pairwise(accumulate(_group_sizes(layers), initial=0)))
        super().__init__(nn.Sequential(*list(network)[start:stop]) for start, stop in edges)
        self.layers, self._mask_key = layers, network.mask_key
        self._starts = [layers[start] for start, _ in edges]

    @property
    def again(self) -> list[nn.Module]:
        # Skips belong to others too, and what an activation writes over is not there again.
        return [
            group
            for group, first in zip(self.groups, self._starts, strict=True)
            if not (isinstance(first, Stash | Activation) or first.names)
        ]

    def scores(self, images: Tensor) -> Tensor:
        self._mask_key.images = tuple(range(len(images)))
        return super().scores(images)


def _group_sizes(layers: Sequence[Layer]) -> tuple[int, ...]:
    """Number of layers in each group. Stashes and pops stand alone: their maps belong to others."""
    sizes: list[int] = []
    alone = True
    for layer in layers:
        starts = isinstance(layer, Conv | TransposedConv | Pool | Upsample | GlobalPool | Stash)
        if alone or starts or layer.names:
            sizes.append(1)
        else:
            sizes[-1] += 1
        alone = isinstance(layer, Stash) or bool(layer.names)
    return tuple(sizes)


def _ours(poolings: int, convolutions: int, width: int) -> GroupedNetwork:
    options = UNetOptions(poolings, convolutions, width, bands=3, classes=CLASSES, norm="instance")
    layers = unet_layers(options)
    return ListedNetwork(layers, build_network(layers))


@cache
def _adopted(decoder: str, encoder: str) -> Adopted:
    options = {"encoder_name": encoder, "encoder_weights": None, "classes": CLASSES}
    return adopt(Choice(f"{SMP}:{decoder}", options, 3).module(), 3)


def _smp(decoder: str, encoder: str, width: int) -> GroupedNetwork:
    adopted = _adopted(decoder, encoder)
    return ListedNetwork(adopted.layers, adopted.network())


def _resnet(width: int) -> GroupedNetwork:
    """torchvision's, with batch norm of a step."""
    options = {"weights": None, "num_classes": CLASSES}
    parts = dict(Choice("torchvision.models:resnet50", options, 3).module().named_children())
    stem = (parts[name] for name in ("conv1", "bn1", "relu", "maxpool"))
    blocks = [block for number in range(1, 5) for block in parts[f"layer{number}"].children()]
    head = nn.Sequential(parts["avgpool"], nn.Flatten(), parts["fc"])
    return GroupedNetwork([nn.Sequential(*stem), *blocks, head])


class UNet3d(GroupedNetwork):
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
        self.groups.append(nn.Conv3d(channels, CLASSES, 1))
        self._levels = levels

    def _two(self, wide: int, out: int, pooled: bool = False) -> None:
        modules: list[nn.Module] = [nn.MaxPool3d(2)] if pooled else []
        for channels in (wide, out):
            modules.append(nn.Conv3d(channels, out, 3, padding=1, bias=False))
            modules += [nn.InstanceNorm3d(out), nn.LeakyReLU(0.01, inplace=True)]
        self.groups.append(nn.Sequential(*modules))

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
        scores: Tensor = last(x)
        return scores


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
        package: Where its module comes from, if not from here.
    """

    build: Callable[[int], GroupedNetwork]
    unit: int
    dimensions: int = 2
    bands: int = 3
    per_image: bool = False
    articles: float | None = None
    package: str = ""


# IBM's articles on TFLMS 2, at developer.ibm.com: "DeepLabv3+ image segmentation model with TFLMS
# version 2" and "Performance results with TensorFlow Large Model Support v2".
DEEPLAB = (3200 / 1400) ** 2
KINDS = {
    **{
        f"deeplab-{name}": Kind(
            partial(_smp, "DeepLabV3Plus", encoder), 16, articles=DEEPLAB, package=SMP
        )
        for name, encoder in (
            ("xception", "tu-xception41"), ("resnet", "resnet50"), ("mobilenet", "mobilenet_v2"),
        )
    },
    "pspnet": Kind(partial(_smp, "PSPNet", "resnet50"), 16, package=SMP),
    "resnet": Kind(_resnet, 16, per_image=True, articles=10, package="torchvision"),
    "unet-3d": Kind(UNet3d, 4, dimensions=3, bands=1, articles=5),
    "unet": Kind(partial(_ours, 4, 2), 16),
    "unet-5": Kind(partial(_ours, 4, 5), 16),
}  # fmt: skip


def labels_of(kind: Kind, batch: int, side: int) -> Tensor:
    """Random labels of a batch, int64."""
    shape = (batch,) if kind.per_image else (batch, *(side,) * kind.dimensions)
    return torch.randint(0, CLASSES, shape)
