"""Compare a module's list of layers, in one piece and in tiles, with the module on the whole image.

The module runs in plain torch, in float64; nothing of `tilenet.adoption`'s own proof is used. Three
things may happen to a module: its list is exact, it is refused in one sentence, or, what is a
mistake of tilenet's, anything else.
"""

import copy
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import lcm
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from grammar import BANDS
from mpi4py import MPI
from sweeps import sweep_step, swept_map
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tilenet
from tilenet.adoption.adopt import Adopted, BatchNormMode
from tilenet.errors import TilenetError
from tilenet.geometry.halo_rule import halo_rule
from tilenet.geometry.layers import Dropout
from tilenet.geometry.tiles import Cut, Tiling, cut, owned
from tilenet.model.dropout import KeyedDropout
from tilenet.model.network import Network
from tilenet.model.origin import Origin
from tilenet.parallel.exchange.network import spatial_network
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.planning.compatibility import whole_image

__all__ = [
    "Outcome",
    "Run",
    "apart",
    "by_module",
    "judge",
    "loss_of",
    "mode_of",
    "run_module",
    "size_for",
    "without_drops",
]

LOGITS, GRADIENTS = 1e-12, 1e-10
# Gradients are compared relative to their own largest value, and at least to this part of the
# largest of all weights; those of a bias to the largest of its kernel's, which sums the same cells:
# before a norm a bias has the gradient 0, of which sums leave their rounding.
LEAST = 1e-3
# How many times the module's own change, when its image changes by one rounding, is still rounding.
ROUNDINGS = 30
LEAST_PX, MOST_PX = 24, 1100
MOST_SECONDS = 120
MOST_CHARACTERS = 600
# Tiles along rows and columns, and how many images.
GRIDS = {(1, 1): 3, (2, 2): 2, (3, 1): 1, (1, 3): 1}

Kind = Literal["exact", "refused", "failed", "no module"]


@dataclass
class Outcome:
    """What happened to a module.

    Attributes:
        kind: `no module`: torch itself cannot run it.
        words: The sentence of a refusal, the kind of a failure.
        more: Differences, or a traceback.
        apart: The largest difference of each thing compared, by mode and thing.
        widened: Largest of the bounds that the module's own rounding asked for.
    """

    kind: Kind
    words: str = ""
    more: str = ""
    apart: dict[str, float] = field(default_factory=dict)
    widened: float = 0.0


@dataclass
class Run:
    """A forward and backward pass.

    Attributes:
        logits: Of the whole image.
        image: The gradient of the image.
        weights: Gradients of weights, by the module's names.
        buffers: Afterwards, by the module's names.
    """

    logits: Tensor
    image: Tensor
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Late(Exception):
    """Raised by the alarm."""


def mode_of(seed: int) -> BatchNormMode:
    """What is made of batch norm's statistics in the module of a seed."""
    return "step" if seed // 2 % 2 else "frozen"


@contextmanager
def limited(seconds: int = MOST_SECONDS) -> Iterator[None]:
    """Ends what takes longer with `Late`."""

    def late(signum: int, frame: Any) -> None:
        raise Late(f"took more than {seconds} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def first(out: Any) -> Tensor:
    """The map of a module that gives several."""
    while not isinstance(out, Tensor):
        out = next(iter(out.values())) if isinstance(out, dict) else out[0]
    return out


def loss_of(logits: Tensor) -> Tensor:
    """A sum over cells whose gradient differs in every one."""
    one = logits[:1]
    weights = torch.linspace(-1, 2, one.numel(), dtype=torch.float64).view_as(one)
    return (weights * logits.square()).sum()


def image_for(size: tuple[int, int], images: int) -> Tensor:
    generator = torch.Generator().manual_seed(17)
    return torch.randn(images, BANDS, *size, generator=generator, dtype=torch.float64)


def run_module(module: nn.Module, image: Tensor, batch_norm: BatchNormMode) -> Run:
    """The module itself, on a copy: in evaluation but, with `step`, for batch norms that train."""
    module = copy.deepcopy(module).double().train()
    norms = [
        part
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
    ]
    module.eval()
    for norm in norms if batch_norm == "step" else []:
        norm.train()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            part.register_forward_hook(contiguous)
    image = image.clone().requires_grad_()
    with NearestOfFloat32():
        logits = first(module(image))
    loss_of(logits).backward()
    assert image.grad is not None
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return Run(logits.detach(), image.grad, gradients, dict(module.named_buffers()))


def contiguous(norm: nn.Module, inputs: Any, output: Tensor) -> None:
    """Hand a norm its gradients with channels first.

    Of one image with its channels last, such as a layer norm behind leaves, torch 2.13 on a CPU
    computes a wrong gradient of instance norm, as finite differences show.
    """
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.contiguous())


class NearestOfFloat32(TorchFunctionMode):
    """Enlarges float64 by the cells that float32 takes.

    Otherwise, of two cells that are equally near, torch takes either in float64, as the memory
    format, the channels and the size have it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        size = kwargs.get("size")
        if func is not F.interpolate or kwargs["mode"] != "nearest" or size is None:
            return func(*args, **kwargs)
        (x,) = args
        places = torch.arange(x.shape[2] * x.shape[3], dtype=torch.float32)
        taken = func(places.view(1, 1, *x.shape[2:]), size).long()
        return x.flatten(2)[:, :, taken.flatten()].view(*x.shape[:2], *taken.shape[2:])


class Drops(TorchFunctionMode):
    """Counts calls of dropout that drop; of parts that lead nowhere too."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, F.dropout2d, F.dropout3d):
            training = kwargs["training"] if "training" in kwargs else args[2]
            self.count += bool(training)
        return func(*args, **kwargs)


def live_drops(module: nn.Module) -> int:
    """How often a module drops in training."""
    module = copy.deepcopy(module).double().train()
    with Drops() as drops, torch.no_grad(), torch.random.fork_rng(devices=[]):
        module(image_for((64, 96), 2))
    return drops.count


def without_drops(network: Network) -> Network:
    for layer in network.modules():
        if isinstance(layer, KeyedDropout):
            layer.probability = 0.0  # a pipe sets all modules to training
    return network


def by_module(adopted: Adopted, found: Iterator[tuple[str, Tensor | None]]) -> dict[str, Tensor]:
    """Tensors of a list's network by the module's names; a shared weight is there once."""
    named = ((adopted.names.get(own), tensor) for own, tensor in found)
    return {name: tensor for name, tensor in named if name is not None and tensor is not None}


def run_tiles(
    adopted: Adopted, image: Tensor, grid: tuple[int, int], *, drops: bool = False
) -> Run:
    """The list, all tiles of all images stacked as one micro-batch, in `halo_mode: overlap`."""
    layers = adopted.layers
    tiling = cut(*image.shape[2:], Cut(grid=grid), halo_rule("exact", layers))
    network = adopted.network(torch.float64).train()
    network.mask_key.step = 3
    if not drops:
        without_drops(network)
    comm = MPI.COMM_SELF
    spatial = spatial_network(network, layers, [len(layers)], "overlap", comm, comm)
    cpu = [torch.device("cpu")]
    pipe = Pipe(spatial, [len(layers)], cpu, "never", inline=True)
    image = image.clone().requires_grad_()
    numbers = range(len(tiling.tiles))
    windows = [window_of(image[n : n + 1], tiling, k) for n in range(len(image)) for k in numbers]
    images = tuple(10 + n for n in range(len(image)) for _ in numbers)
    origin = Origin(images, tiling, tuple(numbers) * len(image))
    try:
        out = pipe([torch.cat(windows)], [origin])[0]
        logits = torch.cat([whole_of(part, tiling) for part in out.split(len(numbers))])
        loss_of(logits).backward()
    finally:
        spatial.close()
    assert image.grad is not None
    gradients = ((name, p.grad) for name, p in spatial.named_parameters())
    buffers = by_module(adopted, iter(spatial.named_buffers()))
    return Run(logits.detach(), image.grad, by_module(adopted, gradients), buffers)


def run_sweep(adopted: Adopted, image: Tensor, like: Run) -> Run:
    """The list with `halo_mode: sweep`, which gives no gradient of the image."""
    network = without_drops(adopted.network(torch.float64).train())
    logits = sweep_step(adopted, network, image)
    loss_of(logits).backward()
    gradients = ((name, p.grad) for name, p in network.named_parameters())
    buffers = by_module(adopted, iter(network.named_buffers()))
    return Run(logits.detach(), like.image, by_module(adopted, gradients), buffers)


def window_of(image: Tensor, tiling: Tiling, tile: int) -> Tensor:
    read = tiling.tiles[tile].read
    return image[:, :, read.row : read.row + read.height, read.col : read.col + read.width]


def whole_of(parts: Tensor, tiling: Tiling) -> Tensor:
    """The own cells of an image's tiles, put together."""
    owns = [owned(parts[k : k + 1], tile) for k, tile in enumerate(tiling.tiles)]
    cols = tiling.grid[1]
    rows = [torch.cat(owns[k : k + cols], 3) for k in range(0, len(owns), cols)]
    return torch.cat(rows, 2)


def size_for(adopted: Adopted, grid: tuple[int, int], stride: int = 1) -> tuple[int, int]:
    """An image of odd numbers of alignment units, long enough for tiles that do not read all.

    Args:
        stride: Of the module, whose parts may lead nowhere and still not take all sizes.
    """
    unit, halo = lcm(adopted.context.alignment_px, stride), adopted.context.halo_px

    def side(tiles: int, least: int, most: int) -> int:
        units = -(-max(least, (2 * tiles + 1) * unit) // unit)
        if tiles > 1:
            alone = tiles * (2 * (halo // unit) // (tiles - 1) + 1) + 2
            units = alone if units < alone <= most // unit else units
        return (units + 1 - units % 2) * unit

    most = MOST_PX if 1 in grid else MOST_PX // 3
    return side(grid[0], LEAST_PX, most), side(grid[1], LEAST_PX + 4 * unit, most)


def apart(found: Run, wanted: Run, *, buffers: bool = True) -> dict[str, tuple[float, float]]:
    """Largest differences, relative to the largest value, and the bound of each thing."""
    most = max([float(g.abs().max()) for g in wanted.weights.values() if g.numel()] + [1e-30])
    things = {"logits": (found.logits, wanted.logits, LOGITS, 0.0)}
    things["gradient of the image"] = (found.image, wanted.image, GRADIENTS, 0.0)
    for name in {**wanted.weights, **found.weights}:
        zeros = torch.zeros(())
        ours, theirs = found.weights.get(name, zeros), wanted.weights.get(name, zeros)
        kernel = wanted.weights.get(name.removesuffix("bias") + "weight", zeros)
        least = LEAST * most
        if name.endswith("bias") and kernel.numel():
            least = max(least, float(kernel.abs().max()))
        things[f"gradient of {name}"] = (ours, theirs, GRADIENTS, least)
    if buffers:
        for name, ours in found.buffers.items():
            if name in wanted.buffers and ours.is_floating_point():
                things[f"buffer {name}"] = (ours, wanted.buffers[name], LOGITS, 1e-3)
    return {
        what: (difference(ours, theirs, least), bound)
        for what, (ours, theirs, bound, least) in things.items()
    }


def difference(found: Tensor, wanted: Tensor, least: float) -> float:
    if found.dim() and wanted.dim() and found.numel() != wanted.numel():
        return float("inf")
    if found.dim() and wanted.dim():
        found = found.reshape(wanted.shape)
    scale = max(float(wanted.abs().max()), least, 1e-30)
    value = float((found - wanted).abs().max()) / scale
    return float("inf") if value != value else value


def judge(module: nn.Module, batch_norm: BatchNormMode) -> Outcome:
    """What becomes of a module."""
    try:
        run_module(module, image_for((64, 96), 2), batch_norm)
    except Exception as error:
        return Outcome("no module", type(error).__name__, one_line(error)[:200])
    try:
        with limited():
            adopted = tilenet.adopt(module, BANDS, batch_norm)
    except TilenetError as error:
        words = str(error)
        if "\n" in words or len(words) > MOST_CHARACTERS:
            return Outcome("failed", "a refusal is not one sentence", one_line(error)[:200])
        return Outcome("refused", words)
    except Exception as error:
        return crashed("adopt", error)
    drops = [layer for layer in adopted.layers if isinstance(layer, Dropout)]
    if len(drops) > live_drops(module):
        return Outcome("failed", "the list drops what the module does not", f"{len(drops)} layers")
    outcome = Outcome("exact")
    for grid in GRIDS:
        try:
            with limited():
                compare(module, adopted, batch_norm, grid, outcome)
        except Exception as error:
            return crashed(f"run on {grid[0]} × {grid[1]} tiles", error)
        if outcome.kind == "failed":
            return outcome
    return outcome


def crashed(where: str, error: Exception) -> Outcome:
    """An error that is no refusal, named by its kind and by the function that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}, {last.name}"
    return Outcome("failed", f"{where}: {type(error).__name__} in {place}", one_line(error)[:200])


def compare(
    module: nn.Module,
    adopted: Adopted,
    batch_norm: BatchNormMode,
    grid: tuple[int, int],
    outcome: Outcome,
) -> None:
    """Compare on a grid, and note what differs."""
    image = image_for(size_for(adopted, grid, getattr(module, "stride", 1)), GRIDS[grid])
    wanted = run_module(module, image, batch_norm)
    if wanted.logits.shape[2:] == image.shape[2:] and adopted.context.valid:
        outcome.kind, outcome.words = (
            "failed",
            "a map of the image's size is taken for a smaller one",
        )
        return
    mode = "whole" if grid == (1, 1) else "overlap"
    runs: dict[str, Callable[[], tuple[Run, Run]]] = {
        mode: lambda: (run_tiles(adopted, image, grid), wanted)
    }
    if mode == "overlap" and any(isinstance(m, KeyedDropout) for m in adopted.network().modules()):
        runs["overlap with dropout"] = lambda: (
            run_tiles(adopted, image, grid, drops=True),
            run_tiles(adopted, image, (1, 1), drops=True),
        )
    if grid == (3, 1) and not adopted.context.valid:
        mapped = wanted if batch_norm == "frozen" else run_module(module, image, "frozen")
        runs["swept map"] = lambda: (replace(mapped, logits=swept_map(adopted, image)), mapped)
        if whole_image(adopted.layers) in (None, "global average"):
            runs["sweep"] = lambda: (run_sweep(adopted, image, wanted), wanted)
    rounding: dict[str, tuple[float, float]] | None = None
    wrong: dict[str, str] = {}
    for name, run in runs.items():
        for what, (value, bound) in apart(*run()).items():
            if not value <= bound:
                if rounding is None:
                    near = run_module(module, image * (1 + 2**-52), batch_norm)
                    rounding = apart(near, wanted)
                own = ROUNDINGS * rounding.get(what, (0.0, 0.0))[0]
                if value <= own:
                    outcome.widened = max(outcome.widened, value)
                    continue
                kind = "gradients" if what.startswith("gradient") else what.split()[0]
                wrong.setdefault(kind, f"{name}, {what}: {value:.1e}")
            else:
                key = f"{name}: {what.split()[0]}"
                outcome.apart[key] = max(outcome.apart.get(key, 0.0), value)
    if wrong:
        outcome.kind, outcome.words = "failed", f"{mode} differs: {', '.join(sorted(wrong))}"
        outcome.more = f"{grid[0]} × {grid[1]} tiles of {tuple(image.shape)}: " + "; ".join(
            wrong.values()
        )
