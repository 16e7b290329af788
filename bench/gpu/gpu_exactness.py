"""Whether tiles, partitions, checkpointing and swapping change a GPU's result, in float64.

Networks have dropout, the loss is cross-entropy over random labels with holes. The reference is
the same network on the same device without any of it, so that what differs is not the arithmetic.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.gpu.gpu_part import Asked, Figures, wait
from bench.report import Claim, Found, at_least, at_most
from bench.swapping.lms_networks import OurUNet
from bench.swapping.lms_training import Place, slabs_of
from tilenet import swapping as lms
from tilenet.geometry.halo import context_of
from tilenet.geometry.tiles import Cut, cut, halo_rule, owned
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.geometry.windows import Window
from tilenet.model.choices import Checkpointing
from tilenet.model.loss import cross_entropy, pixel_weight
from tilenet.model.network import Network, build_network
from tilenet.model.skips import Origin
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.pipeline.skip_store import HostStore
from tilenet.parallel.swap.actions import Action
from tilenet.parallel.swap.copies import HostCopies
from tilenet.parallel.swap.statistics import SwapStatistics
from tilenet.planning.swap.choose import ACTIONS
from tilenet.swapping import swapping

__all__ = ["different", "partitions", "swaps", "tiles"]

LOSS, GRADIENTS = 1e-12, 1e-10
IGNORE = 255
MODES: tuple[Checkpointing, ...] = ("always", "except_last", "never")
Outcome = tuple[float, dict[str, Tensor]]


@dataclass(frozen=True)
class Sample:
    """An image (1, bands, H, W) with labels (1, H, W)."""

    number: int
    image: Tensor
    labels: Tensor


def tiles(asked: Asked) -> Found:
    """Tiles with exact halos against the whole image."""
    size = (1024, 768) if asked.cuda else (96, 128)
    poolings, base = (4, 32) if asked.cuda else (2, 4)
    rows: list[Figures] = []
    for upsampling in ("nearest", "bilinear", "transposed"):
        options = UNetOptions(
            poolings, base=base, bands=3, classes=3, dropout=0.2, upsampling=upsampling
        )
        context = context_of(unet_layers(options))
        sample = _sample(options, size, 5, asked.device)
        whole = _in_tiles(options, sample, (1, 1), context.halo_px)
        less = context.halo_px - context.alignment_px
        for grid, halo_px in (((1, 2), context.halo_px), ((2, 3), context.halo_px), ((2, 3), less)):
            if not asked.late:
                found = _in_tiles(options, sample, grid, halo_px)
                case = {"upsampling": upsampling, "tiles": f"{grid[0]} × {grid[1]}"}
                rows.append(
                    {**case, "less_px": context.halo_px - halo_px, **different(found, whole)}
                )
    exact = [row for row in rows if not row["less_px"]]
    control = [row["gradients"] for row in rows if row["less_px"]]
    claims = _claims("tiles against the whole image", exact)
    if control:
        claims.append(
            at_least("a halo one unit too small shows in the gradients by", min(control), GRADIENTS)
        )
    return {"size_px": list(size), "rows": rows}, claims


def _in_tiles(options: UNetOptions, sample: Sample, grid: tuple[int, int], halo_px: int) -> Outcome:
    network = _network(options, sample.image.device)
    network.mask_key.images = (sample.number,)
    layers = unet_layers(options)
    height, width = sample.labels.shape[1:]
    rule = halo_rule(halo_px, context_of(layers), layers, 0)
    parts = []
    for tile in cut(height, width, Cut(grid), rule).tiles:
        logits = network(_window(sample.image, tile.read))
        parts.append((owned(logits, tile), _window(sample.labels, tile.own)))
    return _outcome(network, parts)


def _window(x: Tensor, window: Window) -> Tensor:
    rows = slice(window.row, window.row + window.height)
    return x[..., rows, window.col : window.col + window.width]


def partitions(asked: Asked) -> Found:
    """One GPU named several times, in all ways of checkpointing, against no pipeline."""
    poolings, base, side = (4, 16, 256) if asked.cuda else (2, 4, 16)
    options = UNetOptions(
        poolings, base=base, bands=3, classes=3, norm="instance", norm_scope="tile", dropout=0.2
    )
    sizes = [(side, side), (2 * side, side), (side, 3 * side), (side, side)]
    batch = [_sample(options, size, number, asked.device) for number, size in enumerate(sizes)]
    network = _network(options, asked.device)
    parts = []
    for one in batch:
        network.mask_key.images = (one.number,)
        parts.append((network(one.image), one.labels))
    wanted = _outcome(network, parts)
    rows: list[Figures] = []
    for mode in MODES:
        for count, stored in ((1, False), (2, False), (3, True), (4, False), (6, True)):
            if asked.late or (asked.quick and count in (2, 4)):
                continue
            found = _piped(options, batch, count, mode, stored, asked.device)
            case = {"partitions": count, "checkpointing": mode, "on_host": stored}
            rows.append({**case, **different(found, wanted)})
    return {"rows": rows}, _claims("partitions against none", rows)


def _piped(
    options: UNetOptions,
    batch: list[Sample],
    count: int,
    mode: Checkpointing,
    stored: bool,
    device: torch.device,
) -> Outcome:
    network = _network(options, device)
    balance = [len(part) for part in np.array_split(np.arange(len(network)), count)]
    copies = HostCopies(slabs_of(Place(device, 1 << 30, 4 << 30, 0)), SwapStatistics())
    stores = [HostStore(copies, device, lookahead=1) for _ in balance] if stored else None
    pipe = Pipe(network, balance, [device] * count, mode, "float64", stores=stores)
    outputs = pipe([one.image for one in batch], [Origin((one.number,)) for one in batch])
    labels = [one.labels for one in batch]
    found = _outcome(network, list(zip(outputs, labels, strict=True)))
    wait(device)
    copies.close()
    return found


def swaps(asked: Asked) -> Found:
    """What is saved for backward swapped in all ways, against nothing swapped."""
    poolings, base, side = (4, 32, 512) if asked.cuda else (2, 4, 32)
    torch.manual_seed(1)
    network = OurUNet(base, poolings, 2).double().to(asked.device).train()
    images = torch.randn(2, 3, side, side, dtype=torch.float64).to(asked.device)
    labels = torch.randint(0, 4, (2, side, side)).to(asked.device)

    def trained(steps: int = 1) -> Outcome:
        for _ in range(steps):
            network.zero_grad()
            loss = network(images, labels)
            loss.backward()
        return float(loss.detach()), _gradients(network)

    groups = [*network.groups, network.loss]
    some = 6 * base * images.numel() // 3 * 8
    # Where torch sees a GPU swapping takes pinned memory, to which a CPU's tensors do not go.
    folder = None if asked.cuda else tempfile.gettempdir()
    every = partial(swapping, network, min_bytes=0, swap_dir=folder)
    ways: dict[str, Callable[[], Any]] = {
        "everything": every,
        "some": partial(every, limit_bytes=some),
        "without lookahead": partial(every, lookahead=0),
        "on a stream of its own": lambda: _aside(asked.device, every()),
    }
    if asked.cuda or not torch.cuda.is_available():
        ways["as IBM's"] = _everywhere
    for turn in range(len(ACTIONS)):
        actions = {group: _action(turn + place, group) for place, group in enumerate(groups)}
        ways[f"keep, swap, compute again, turn {turn}"] = partial(every, actions=actions)
    torch.use_deterministic_algorithms(asked.cuda, warn_only=True)
    wanted = trained()
    rows = []
    for name, way in ways.items():
        if asked.late:
            continue
        with way() as counted:
            # The first step is in an order that nobody knew; the third is as the two before.
            found = trained(3)
        wait(asked.device)
        same = all(torch.equal(found[1][key], one) for key, one in wanted[1].items())
        out = lms.memory_reclaimed() if counted is None else counted.out_bytes
        out_mib = out / 2**20
        rows.append(
            {"swapped": name, **different(found, wanted), "same_bits": same, "out_mib": out_mib}
        )
    torch.use_deterministic_algorithms(False)
    claims = _claims("swapping against none", rows)
    idle = [row for row in rows if not row["out_mib"]]
    claims.append(at_most("ways that swapped nothing, of those compared", len(idle), 0))
    return {"rows": rows}, claims


def different(found: Outcome, wanted: Outcome) -> Figures:
    """Relative differences: of the loss, and the largest of a parameter's gradient."""
    if found[1].keys() != wanted[1].keys():
        raise RuntimeError("not the same parameters have gradients")
    gradients = [
        float((found[1][name] - one).abs().max() / one.abs().max())
        for name, one in wanted[1].items()
    ]
    return {"loss": abs(found[0] - wanted[0]) / abs(wanted[0]), "gradients": _worst(gradients)}


def _worst(values: list[float]) -> float:
    """The largest; of what is no number, that: `max` would pass it over."""
    return next((one for one in values if isnan(one)), max(values))


def _claims(what: str, rows: list[Figures]) -> list[Claim]:
    if not rows:
        raise RuntimeError("the time was over before anything was compared")
    return [
        at_most(f"float64, {what}: losses differ by", _worst([r["loss"] for r in rows]), LOSS),
        at_most(
            f"float64, {what}: gradients differ by",
            _worst([r["gradients"] for r in rows]),
            GRADIENTS,
        ),
    ]


def _network(options: UNetOptions, device: torch.device) -> Network:
    network = build_network(unet_layers(options), 7, torch.float64, device)
    network.mask_key.step = 3
    return network.train()


def _sample(
    options: UNetOptions, size: tuple[int, int], number: int, device: torch.device
) -> Sample:
    """A random image and its labels, a quarter of which do not count."""
    generator = torch.Generator().manual_seed(number)
    image = torch.randn(1, options.bands, *size, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, options.classes, (1, *size), generator=generator)
    labels[:, -size[0] // 2 :, : size[1] // 2] = IGNORE
    return Sample(number, image.to(device), labels.to(device))


def _outcome(network: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> Outcome:
    """The loss over logits and labels, and its gradients."""
    losses = torch.stack([cross_entropy(logits, labels, IGNORE) for logits, labels in parts])
    total = losses.sum() / sum(pixel_weight(labels, IGNORE) for _, labels in parts)
    total.backward()  # type: ignore[no-untyped-call]
    return float(total.detach()), _gradients(network)


def _gradients(network: nn.Module) -> dict[str, Tensor]:
    named = network.named_parameters()
    return {name: one.grad.detach().clone() for name, one in named if one.grad is not None}


def _action(number: int, group: nn.Module) -> Action:
    again = isinstance(group, nn.Sequential | nn.Conv2d)  # see lms_networks.OurUNet
    action = ACTIONS[number % len(ACTIONS)]
    return action if again or action in ("keep", "swap") else "swap"


@contextmanager
def _aside(device: torch.device, inside: Any) -> Iterator[Any]:
    """On a stream that is not the default one."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    wait(device)
    with torch.cuda.stream(stream), inside as counted:
        yield counted
    wait(device)


@contextmanager
def _everywhere() -> Iterator[None]:
    """As a script written for IBM's PyTorch would have it."""
    size = lms.get_size_lms()
    lms.set_size_lms(0)
    lms.reset_memory_reclaimed()
    lms.set_enabled_lms(True)
    try:
        yield
    finally:
        lms.set_enabled_lms(False)
        lms.set_size_lms(size)
