"""Networks shared out over ranks, next to the same network on the whole image in one process."""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isnan
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from tilenet.choices import Checkpointing, HaloMode
from tilenet.geometry.halo_rule import HaloRule, halo_rule
from tilenet.geometry.layers import Layer
from tilenet.geometry.ownership import tiling_shares
from tilenet.geometry.tiles import Cut, Tiling, cut
from tilenet.model.network import Network, build_network
from tilenet.model.origin import Origin
from tilenet.parallel.exchange.network import spatial_network
from tilenet.parallel.pipeline.flow import MicroBatch
from tilenet.parallel.pipeline.pipe import Pipe

CPU = torch.device("cpu")


def short_halo(*arguments: Any, **options: Any) -> HaloRule:
    """The rule of a halo that is one unit short."""
    rule = halo_rule(*arguments, **options)
    return replace(rule, halo_px=rule.halo_px - rule.alignment_px)


def grids(size: int) -> list[tuple[int, int]]:
    """All grids of so many ranks."""
    return [(rows, size // rows) for rows in range(1, size + 1) if size % rows == 0]


@dataclass(frozen=True)
class Case:
    """What is computed twice.

    Attributes:
        layers: The network.
        size: Of the extended image.
        grid: Of ranks.
        unit: Own windows start at multiples of it.
        halo: Of own windows, in overlap mode.
        mode: How layers get what they look at.
        images: Micro-batches, of one image each.
        partitions: Of about equally many layers.
        most: Micro-batches under way at once, which go back while others go forward; None: GPipe.
    """

    layers: tuple[Layer, ...]
    size: tuple[int, int]
    grid: tuple[int, int]
    unit: int = 1
    halo: int = 0
    mode: HaloMode = "exchange"
    images: int = 1
    partitions: int = 1
    checkpointing: Checkpointing = "never"
    threads: bool = False
    most: int | None = None
    dtype: torch.dtype = torch.float64

    @property
    def tiling(self) -> Tiling:
        return cut(
            *self.size,
            Cut(grid=self.grid),
            HaloRule(self.halo, self.unit, exchanged=self.mode == "exchange"),
        )

    @property
    def balance(self) -> list[int]:
        edges = [len(self.layers) * j // self.partitions for j in range(self.partitions + 1)]
        return [b - a for a, b in pairwise(edges)]

    def network(self) -> Network:
        network = build_network(self.layers, 5, self.dtype)
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if name.endswith("bias") or parameter.dim() == 1:  # zeros and ones hide mistakes
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) + 0.5)
            for buffer in network.buffers():
                buffer.copy_(7 * torch.rand(buffer.shape, generator=generator) + 1)
        network.mask_key.step = 3
        return network.train()

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(17)
        shape = (1, self.layers[0].in_channels, *self.size)
        return [
            torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
            for _ in range(self.images)
        ]


@dataclass
class Result:
    """Whole outputs, and the gradients of the images and the parameters; on every rank.

    Those of images are not known where micro-batches flow.
    """

    outputs: list[Tensor]
    images: list[Tensor]
    parameters: dict[str, Tensor]
    running: dict[str, Tensor]


def weights_like(output: Tensor) -> Tensor:
    """Of a loss whose gradient differs in every cell."""
    return torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view_as(output)


def whole(case: Case) -> Result:
    """In one process, plainly; batch norm sees all images at once."""
    network = case.network()
    images = [image.requires_grad_() for image in case.inputs()]
    network.mask_key.images = tuple(range(10, 10 + case.images))
    outputs = torch.split(network(torch.cat(images)), 1)
    loss = torch.zeros((), dtype=torch.float64)
    for one in outputs:
        loss = loss + (weights_like(one) * one.double().square()).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return Result(
        [one.detach() for one in outputs],
        [gradient(image) for image in images],
        {name: gradient(p) for name, p in network.named_parameters() if p.requires_grad},
        {name: b.clone() for name, b in network.named_buffers()},
    )


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def shared_out(case: Case, comm: MPI.Intracomm, stacked: bool = False) -> Result:
    """Over the ranks of `comm`. With `stacked` all images are one micro-batch."""
    network, tiling = case.network(), case.tiling
    spatial = spatial_network(network, case.layers, case.balance, case.mode, comm, comm)
    pipe = Pipe(
        spatial, case.balance, [CPU] * case.partitions, case.checkpointing, inline=not case.threads
    )
    tile = tiling.tiles[comm.rank]
    read, own = tile.read, tile.own
    images = [
        image[:, :, read.row : read.row + read.height, read.col : read.col + read.width].clone()
        for image in case.inputs()
    ]
    shares = [axis[-1].out_edges for axis in tiling_shares(case.layers, tiling)]
    row, col = divmod(comm.rank, tiling.grid[1])
    top, left = shares[0][row], shares[1][col]
    height, width = shares[0][row + 1] - top, shares[1][col + 1] - left
    size = (1, case.layers[-1].out_channels, shares[0][-1], shares[1][-1])
    outputs = []

    def measure(_: int, one: Tensor) -> Tensor:
        if case.mode == "overlap":
            one = one[:, :, top - read.row :][:, :, :height, left - read.col :][..., :width]
        assert one.shape == (*size[:2], height, width)
        outputs.append(one.detach())
        mine = weights_like(torch.empty(size))[:, :, top : top + height, left : left + width]
        return (mine * one.double().square()).sum()

    origins = [Origin((10 + i,), tiling, (comm.rank,), i) for i in range(case.images)]
    if case.most is not None:
        feed = map(MicroBatch, images, origins, range(case.images))
        pipe.train_in_flow(feed, measure, case.most)
    else:
        for image in images:
            image.requires_grad_()
        if stacked:
            numbers = tuple(range(10, 10 + case.images))
            together = Origin(numbers, tiling, (comm.rank,) * case.images)
            computed = list(torch.split(pipe([torch.cat(images)], [together])[0], 1))
        else:
            computed = pipe(list(images), origins)
        loss = torch.zeros((), dtype=torch.float64)
        for number, one in enumerate(computed):
            loss = loss + measure(number, one)
        loss.backward()  # type: ignore[no-untyped-call]
    gathered = []
    for one in outputs:
        full = one.new_zeros(size)
        full[:, :, top : top + height, left : left + width] = one.detach()
        gathered.append(summed(full, comm))
    to_images = []
    for image in images if case.most is None else []:
        full = image.new_zeros((1, image.shape[1], *case.size))
        there = full[:, :, read.row : read.row + read.height, read.col : read.col + read.width]
        there.copy_(gradient(image))
        to_images.append(summed(full, comm))
    result = Result(
        gathered,
        to_images,
        {
            name: summed(gradient(p).clone(), comm)
            for name, p in spatial.named_parameters()
            if p.requires_grad
        },
        {name: b.clone() for name, b in spatial.named_buffers()},
    )
    assert own.height > 0
    spatial.close()
    return result


def summed(x: Tensor, comm: MPI.Intracomm) -> Tensor:
    comm.Allreduce(MPI.IN_PLACE, x.detach().numpy())
    return x.detach()


def worst(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest wanted value."""
    if found.shape != wanted.shape:
        return inf
    scale = float(wanted.abs().max())
    assert scale > 0, "zeros prove nothing"
    difference = float((found.double() - wanted.double()).abs().max()) / scale
    return inf if isnan(difference) else difference


def assert_same(
    found: Result, wanted: Result, outputs: float, gradients: float, comm: MPI.Intracomm
) -> None:
    """Compare, and fail on all ranks if on one. Collective."""
    gaps = [("output", outputs, *pair) for pair in zip(found.outputs, wanted.outputs, strict=True)]
    images = zip(found.images, wanted.images, strict=bool(found.images))
    gaps += [("image", gradients, *pair) for pair in images]
    for kind, ours, theirs, bound in (
        ("gradient", found.parameters, wanted.parameters, gradients),
        ("buffer", found.running, wanted.running, outputs),
    ):
        assert set(ours) == set(theirs)
        gaps += [(f"{kind} {name}", bound, ours[name], theirs[name]) for name in theirs]
    here = [worst(one, other) for _, _, one, other in gaps]
    most = [max(ranks) for ranks in zip(*comm.allgather(here), strict=True)]
    wrong = [
        f"{name}: {value:.1e} > {bound:.0e}"
        for (name, bound, _, _), value in zip(gaps, most, strict=True)
        if not value <= bound
    ]
    assert not wrong, ", ".join(wrong)
