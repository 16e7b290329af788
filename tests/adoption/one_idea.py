"""Modules of one idea each, and the words by which some are refused."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CASES", "Around", "Case", "Frozen", "around", "weight"]


class Around(nn.Module):
    """A convolution, a function of the module and its map, and whatever parts that needs."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            elif part is not None:
                self.register_buffer(name, part, persistent=not name.startswith("held"))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.conv(x))


@dataclass(frozen=True)
class Case:
    """A module, and what becomes of it.

    Attributes:
        make: Makes it.
        refused: Words of the sentence that refuses it; none: it is adopted.
        batch_norm: How it is adopted.
        trains: Whether it is compared in training mode too.
    """

    make: Callable[[], nn.Module]
    refused: str = ""
    batch_norm: str = "frozen"
    trains: bool = True


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.rand(*shape, generator=torch.Generator().manual_seed(1)) + 0.5)


def around(function: Callable[..., Tensor], refused: str = "", **parts: object) -> Case:
    return Case(lambda: Around(function, **copy.deepcopy(parts)), refused)  # type: ignore[arg-type]


class Frozen(nn.Module):
    """An encoder with dropout and batch norm that stays in evaluation in training."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)
        )
        self.head = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.encoder[1].running_mean += 0.3

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def partly_in_evaluation() -> nn.Module:
    module = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5)), nn.Conv2d(4, 2, 1)
    )
    module[0].eval()
    return module


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.resnet = nn.ModuleDict({"conv1": nn.Conv2d(3, 4, 3, padding=1)})
        self.layer0 = nn.Sequential(self.resnet["conv1"], nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer0(x)


class ChangesImage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mul_(2.0))


class Floats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.float())


def seen(m: Around, x: Tensor) -> Tensor:
    m.count += 1
    return x * m.count


def seen_in_training(m: Around, x: Tensor) -> Tensor:
    if m.training:
        m.count += 1
    return x * m.count


def counted(m: Around, x: Tensor) -> Tensor:
    m.count += 1
    return x


def running(m: Around, x: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3)))
    return x * m.mean[:, None, None]


def replaced(m: Around, x: Tensor) -> Tensor:
    m.mean = m.mean * 0.5
    return x


def standardised(kernel: Tensor, gain: Tensor) -> Tensor:
    """As timm's ScaledStdConv2d has it."""
    rows = kernel.reshape(1, len(kernel), -1)
    rows = F.batch_norm(rows, None, None, 0.5 * gain.view(-1), training=True, momentum=0.0)
    return rows.reshape_as(kernel)


def blocks(x: Tensor, n: int) -> Tensor:
    """(B, n, n, C, H / n, W / n)."""
    rows, cols = x.shape[2] // n, x.shape[3] // n
    return x.view(len(x), x.shape[1], rows, n, cols, n).permute(0, 3, 5, 1, 2, 4)


def drop_path(keep: float) -> Callable[..., Tensor]:
    def function(m: nn.Module, x: Tensor) -> Tensor:
        if not m.training:
            return x
        return x * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(keep).div_(keep)

    return function


def drop_path_divided_last(m: nn.Module, x: Tensor) -> Tensor:
    if not m.training:
        return x
    return x * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.75) / 0.75


def one_mask_divided_twice(m: nn.Module, x: Tensor) -> Tensor:
    x = x * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.5)
    return x / 0.5 + x / 0.5


def one_mask(m: nn.Module, x: Tensor) -> Tensor:
    mask = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.5)
    return x * (mask / 0.5) + x.relu() * (mask / 0.5) if m.training else x + x.relu()


def mask_of_a_batch(m: nn.Module, x: Tensor) -> Tensor:
    return x * x.new_empty(1, 1, 1, 1).bernoulli_(0.5).div_(0.5) if m.training else x


def pool_first(m: Around, x: Tensor) -> Tensor:
    up = F.interpolate(F.adaptive_avg_pool2d(x, 1), size=x.shape[-2:], mode="bilinear")
    return torch.cat([up, m.one(x)], 1)


def pool_of_last(m: Around, x: Tensor) -> Tensor:
    one, two = m.one(x), m.two(x)
    return torch.cat([F.interpolate(F.adaptive_avg_pool2d(x, 1), size=two.shape[2:]), one, two], 1)


def head_before(m: Around, x: Tensor) -> Tensor:
    m.one(x)  # an auxiliary head, which training alone would use
    return F.interpolate(F.adaptive_avg_pool2d(x, 2), size=x.shape[-2:], mode="bilinear") + x


def channels_last_drop(m: nn.Module, x: Tensor) -> Tensor:
    return F.dropout2d(x.permute(0, 2, 3, 1), 0.5, m.training).permute(0, 3, 1, 2)


def regions(m: Around, x: Tensor) -> Tensor:
    """Each cell by its likeness to averages over regions, as in OCR."""
    shares = m.one(x).flatten(2).softmax(2)
    objects = m.two((shares @ x.flatten(2).mT).mT.unsqueeze(3)).squeeze(3)
    likeness = torch.bmm(x.flatten(2).mT, objects).softmax(-1)
    return (likeness @ objects.mT).mT.reshape(x.shape) + x


def put_back(
    x: Tensor, width: int, change: Callable[[Tensor], Tensor] = torch.tanh, **windows: int
) -> Tensor:
    largest, places = F.max_pool2d(x, width, return_indices=True, **windows)
    windows = {"stride": width, **windows}
    return F.max_unpool2d(change(largest), places, width, output_size=x.shape[2:], **windows)


def fixed_parts() -> nn.Module:
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    module[0].requires_grad_(False)
    return module


def norm_without_bias(norm: nn.Module) -> nn.Module:
    norm.bias = None
    norm.weight = weight(4)
    return nn.Sequential(nn.Conv2d(3, 4, 1), norm)


CASES = {
    # Flags of training
    "dropout without training": around(lambda m, x: F.dropout(x, 0.5, training=False)),
    "dropout2d without training": around(lambda m, x: F.dropout2d(x, 0.5, training=False)),
    "an encoder in evaluation": Case(Frozen, batch_norm="step"),
    "an encoder in evaluation, frozen": Case(Frozen),
    "a part handed in evaluation": Case(partly_in_evaluation, batch_norm="step"),
    "fixed weights": Case(fixed_parts),
    "a buffer as a kernel": around(
        lambda m, x: F.conv2d(x, m.kernel), kernel=torch.rand(2, 4, 1, 1)
    ),
    # Buffers that forward changes
    "a count that is used": around(seen, "changes count", count=torch.ones(())),
    "a count that training uses": around(
        seen_in_training, "changes count", count=torch.ones(4, 1, 1)
    ),
    "a count": around(counted, "changes count", count=torch.ones(())),
    "running means": around(running, "changes mean", mean=torch.ones(4)),
    "a buffer that is replaced": around(replaced, "changes mean", mean=torch.ones(4)),
    # What is no layer
    "rows dropped": around(channels_last_drop, "is not a map"),
    "a map without gradient": around(lambda m, x: torch.cat([x.data, x * x.data], 1)),
    "a map that is changed without gradient": around(
        lambda m, x: x + x.data.clamp_(0), "writes over a part of a map"
    ),
    "a weight without gradient": around(
        lambda m, x: F.conv2d(x, m.w.detach()), w=weight(2, 4, 1, 1)
    ),
    "the pool first": around(pool_first, one=nn.Conv2d(4, 2, 1)),
    "the pool first, as large as the last": around(
        pool_of_last, one=nn.Conv2d(4, 2, 1), two=nn.Conv2d(4, 2, 1)
    ),
    "a head before": around(head_before, one=nn.Conv2d(4, 2, 1)),
    "1 + gamma": around(lambda m, x: x * (1 + m.gamma[:, None, None]), gamma=weight(4)),
    "a sum of kernels": around(
        lambda m, x: F.conv2d(x, m.k + m.l),
        k=weight(2, 4, 1, 1),
        l=weight(2, 4, 1, 1),
    ),
    "a scaled kernel": around(lambda m, x: F.conv2d(x, 2.0 * m.k), k=weight(2, 4, 1, 1)),
    "a kernel with a mask": around(
        lambda m, x: F.conv2d(x, m.k * m.held, padding=1),
        k=weight(2, 4, 3, 3),
        held=torch.tensor([[1.0, 1, 1], [1, 0, 0], [0, 0, 0]]),
    ),
    "a standardised kernel": around(
        lambda m, x: F.conv2d(x, standardised(m.k, m.g), m.b, padding=1),
        k=weight(2, 4, 3, 3),
        g=weight(2, 1, 1, 1),
        b=weight(2),
    ),
    "a kernel less its mean": around(
        lambda m, x: F.conv2d(x, (m.k - m.k.mean((1, 2, 3), keepdim=True)) / m.k.norm()),
        k=weight(2, 4, 3, 1),
        refused="one cell per input pixel|rows and columns|other cells above",
    ),
    "a kernel by variance": around(
        lambda m, x: F.conv2d(x, m.k / torch.var_mean(m.k, (1, 2, 3), keepdim=True)[0].sqrt()),
        k=weight(2, 4, 1, 1),
    ),
    "a kernel of maps": around(
        lambda m, x: F.conv2d(x, x.mean((0, 2, 3))[None, :, None, None]),
        "taken together|of maps|other dimensions",
    ),
    "a transposed kernel that is computed": around(
        lambda m, x: F.conv_transpose2d(x, 2 * m.k), "weight is computed", k=weight(4, 2, 1, 1)
    ),
    "padded channels": around(lambda m, x: F.pad(x, (0, 0, 0, 0, 1, 1))),
    "no padded channels": around(
        lambda m, x: m.one(F.pad(x, (1, 1, 1, 1, 0, 0))), one=nn.Conv2d(4, 2, 3)
    ),
    "float()": Case(Floats, "runs in float64"),
    "a half": around(lambda m, x: x.half().float(), "change their type"),
    "a mean of all": around(lambda m, x: x.mean() * x, "cells are taken together"),
    "a negative slope": around(lambda m, x: F.leaky_relu(x, -0.2)),
    "an image that is changed": Case(ChangesImage, "changes its image"),
    "a lazy layer": Case(lambda: nn.Sequential(nn.LazyConv2d(2, 1)), "have their shapes"),
    "weight norm of old": Case(
        lambda: nn.Sequential(torch.nn.utils.weight_norm(nn.Conv2d(3, 2, 1))),
        r"copied \(Sequential: .*use torch\.nn\.utils\.parametrizations\.weight_norm for torch",
    ),
    "weight norm": Case(
        lambda: nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 2, 1)))
    ),
    "a spectral norm": Case(
        lambda: nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 2, 1))),
        "recorded as one operator",
    ),
    "drop path of a half": Case(lambda: Around(drop_path(0.5)), trains=False),
    "drop path of a quarter": Case(lambda: Around(drop_path(0.75)), trains=False),
    "drop path that divides last": Case(lambda: Around(drop_path_divided_last), trains=False),
    "drop path that divides by something else": around(
        lambda m, x: x * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.75) / 0.5,
        "does not divide what it keeps by the probability .*: div",
    ),
    "drop path that does not divide": around(
        lambda m, x: (x * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.75)).relu(),
        "does not divide what it keeps by the probability .*: relu",
    ),
    "drop path that does not divide its output": around(
        lambda m, x: x * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.75),
        "does not divide what it keeps by the probability",
    ),
    "one mask divided twice": around(one_mask_divided_twice, "samples of several maps"),
    "one mask for two maps": around(one_mask, "samples of several maps"),
    "one mask for a batch": around(mask_of_a_batch, "something else than drop path"),
    "no weights": Case(lambda: nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.ReLU())),
    "two names": Case(TwoNames),
    "a buffer that is not persistent": around(lambda m, x: x * m.held, held=torch.tensor(0.3)),
    "buffers that are not persistent": around(lambda m, x: x * m.held, held=torch.rand(4, 1, 1)),
    "many numbers that are not persistent": around(
        lambda m, x: F.conv2d(x, m.held, padding=5), "not persistent", held=torch.rand(8, 4, 11, 11)
    ),
    "a blur that is not persistent": around(
        lambda m, x: m.up(F.conv2d(F.pad(x, [1] * 4, "reflect"), m.held, stride=2, groups=4)),
        held=torch.tensor([1.0, 2, 1]).outer(torch.tensor([1.0, 2, 1])).repeat(4, 1, 1, 1) / 16,
        up=nn.ConvTranspose2d(4, 2, 2, 2),
    ),
    "a constant": around(lambda m, x: x * torch.tensor(0.3)),
    "batch norm with a weight alone": Case(lambda: norm_without_bias(nn.BatchNorm2d(4))),
    "batch norm of a step with a weight alone": Case(
        lambda: norm_without_bias(nn.BatchNorm2d(4)), batch_norm="step"
    ),
    "group norm with a weight alone": Case(lambda: norm_without_bias(nn.GroupNorm(2, 4))),
    "layer norm with a weight alone": around(
        lambda m, x: F.layer_norm(x.permute(0, 2, 3, 1), (4,), m.w).permute(0, 3, 1, 2),
        w=weight(4),
    ),
    "b + x": around(lambda m, x: m.b[:, None, None] + x, b=weight(4)),
    "b * x": around(lambda m, x: m.b[:, None, None] * x, b=weight(4)),
    "2 + x": around(lambda m, x: 2 + x),
    "an even kernel": around(lambda m, x: m.one(x), one=nn.Conv2d(4, 2, 2, padding="same")),
    "a kernel of 4": around(
        lambda m, x: m.one(x), one=nn.Conv2d(4, 2, 4, padding="same", dilation=3)
    ),
    "everything dropped": Case(
        lambda: Around(lambda m, x: m.drop(x), drop=nn.Dropout(1.0)), "everything is dropped"
    ),
    # All cells
    "a context of all cells": around(
        lambda m, x: (
            x
            + (x.flatten(2).unsqueeze(1) @ m.one(x).flatten(2).softmax(2).unsqueeze(3))[
                :, 0, ..., None
            ]
        ),
        one=nn.Conv2d(4, 1, 1),
    ),
    "regions and cells": around(regions, one=nn.Conv2d(4, 3, 1), two=nn.Conv2d(4, 4, 1)),
    "attention of normalized channels": around(
        lambda m, x: (
            (q := F.normalize(x.view(len(x), 2, 2, -1), dim=-1)).matmul(q.mT).softmax(-1)
            @ x.view(len(x), 2, 2, -1)
        ).view_as(x)
    ),
    "channels by channels": around(
        lambda m, x: (
            F.softmax(torch.bmm(x.flatten(2), x.flatten(2).mT) * 0.01, -1) @ x.flatten(2)
        ).view_as(x)
    ),
    "large numbers of all cells": around(
        lambda m, x: x + 3 * (900 * x).flatten(2).softmax(2).view_as(x)
    ),
    "a softmax of the batch": around(
        lambda m, x: (
            x.permute(1, 0, 2, 3).flatten(1).softmax(1).view(4, -1, *x.shape[2:]).transpose(0, 1)
        ),
        "taken together",
    ),
    "cells by cells": around(
        lambda m, x: ((x.flatten(2).mT @ x.flatten(2)) @ x.flatten(2).mT).mT.reshape(x.shape),
        "matrices",
    ),
    "maxima put back": around(lambda m, x: put_back(x.relu(), 2)),
    "maxima of three put back, to other values": around(
        lambda m, x: put_back(x, 3, lambda y: m.one(y)), one=nn.Conv2d(4, 4, 3, padding=1)
    ),
    "maxima of windows that overlap": around(
        lambda m, x: put_back(x, 3, stride=2, padding=1), "windows that overlap"
    ),
    "a place as a number": around(
        lambda m, x: F.max_pool2d(x, 3, 1, 1, return_indices=True)[1] * x, "place of a maximum"
    ),
    "samples dropped": Case(
        lambda: Around(lambda m, x: F.dropout3d(x, 0.5, m.training)), trains=False
    ),
    # Pads
    "unequal zeros that keep the size": around(
        lambda m, x: m.one(F.pad(x, [0, 1, 0, 1])), one=nn.Conv2d(4, 2, 2)
    ),
    "pads one after another": around(
        lambda m, x: m.one(F.pad(F.pad(x, [0, 1, 0, 1]), [1, 1, 1, 1])), one=nn.Conv2d(4, 2, 4)
    ),
    "cut off": around(lambda m, x: m.one(F.pad(x, [-1, 1, -1, 1])), one=nn.Conv2d(4, 2, 1)),
    "cut off, and more": around(
        lambda m, x: m.one(F.pad(F.pad(x, [-1, 0, -1, 0]), [0, 3, 0, 3])), one=nn.Conv2d(4, 2, 3)
    ),
    "cropped": around(
        lambda m, x: m.one(x).tanh()[:, :, 2:-4, 2:-4], one=nn.Conv2d(4, 2, 1, padding=3)
    ),
    "cropped otherwise": around(
        lambda m, x: m.one(x).tanh()[..., 1:-3, 3:-1], one=nn.Conv2d(4, 2, 1, padding=2)
    ),
    "cropped unevenly": around(
        lambda m, x: m.one(x)[..., 1:, 2:], "rows and columns are treated", one=nn.Conv2d(4, 2, 1)
    ),
    "shifted": around(lambda m, x: x + F.pad(x, [1, -1, 1, -1])),
    "shifted and rectified": around(
        lambda m, x: m.one(F.relu(F.pad(x, [1, -1, 1, -1]))), one=nn.Conv2d(4, 2, 3, padding=1)
    ),
    "zeros above": around(
        lambda m, x: m.one(x) + F.pad(x[..., 1:, 1:], [1, 0, 1, 0]), one=nn.Conv2d(4, 4, 1)
    ),
    "zeros before a maximum": around(lambda m, x: F.max_pool2d(F.pad(x, [0, 1, 0, 1]), 2, 1)),
    "an edge before a maximum": around(
        lambda m, x: F.max_pool2d(F.pad(x, [1] * 4, "replicate"), 3, 1), "at the edge are padded"
    ),
    # Every nth cell
    "focus": around(
        lambda m, x: m.up(torch.cat([x[..., i::2, j::2] for i in (0, 1) for j in (0, 1)], 1)),
        up=nn.ConvTranspose2d(16, 2, 2, 2),
    ),
    "cells as channels": around(
        lambda m, x: F.pixel_shuffle(m.one(F.pixel_unshuffle(x, 2)), 2),
        one=nn.Conv2d(16, 8, 3, padding=1),
    ),
    "rectified cells as channels": around(
        lambda m, x: F.pixel_shuffle(m.one(F.leaky_relu(F.pixel_unshuffle(x, 2))), 2),
        one=nn.Conv2d(16, 8, 3, padding=1),
    ),
    "blocks of cells": around(
        lambda m, x: m.up(blocks(x, 2).flatten(1, 3)), up=nn.ConvTranspose2d(16, 2, 2, 2)
    ),
    "blocks of other cells": around(
        lambda m, x: m.up(blocks(x, 2).transpose(4, 5).flatten(1, 3)),
        "cells change their places|is not a map|must return a map|meet|given",
        up=nn.Conv2d(16, 2, 1),
    ),
    "every third of a part": around(
        lambda m, x: m.up(x[..., 1:-1:2, 1:-1:2]),
        "nth cell .* part",
        up=nn.ConvTranspose2d(4, 2, 2, 2),
    ),
    "every other row": around(
        lambda m, x: m.up(x[..., ::2, :]), "rows and columns are treated", up=nn.Conv2d(4, 2, 1)
    ),
    # Numbers
    "zeros for a map": around(
        lambda m, x: m.one(torch.cat([x, torch.zeros(len(x), 3, *x.shape[2:], dtype=x.dtype)], 1)),
        one=nn.Conv2d(7, 2, 3, padding=1),
    ),
    "numbers of forward": around(lambda m, x: x * x.new_full((4, 1, 1), 0.3)),
    "a maximum column by column": around(
        lambda m, x: x * F.adaptive_max_pool2d(x.transpose(2, 3), 1), "found column by column"
    ),
    "a maximum and its place": around(
        lambda m, x: F.interpolate(F.max_pool2d(x, 2, return_indices=True)[0], scale_factor=2)
    ),
    "more above": around(lambda m, x: m.one(F.pad(x, [1, 0, 1, 0])), one=nn.Conv2d(4, 2, 2)),
    "ones around": around(
        lambda m, x: m.one(F.pad(x, [1] * 4, value=1.0)), "padded other", one=nn.Conv2d(4, 2, 3)
    ),
    # Arguments
    "a sum with a factor": around(lambda m, x: torch.add(x, x, alpha=2)),
    "softplus of another form": around(lambda m, x: F.softplus(x, 2.0)),
    "a divisor": around(
        lambda m, x: F.avg_pool2d(x, 3, 1, 1, divisor_override=2), "usual one .*divisor_override"
    ),
}
