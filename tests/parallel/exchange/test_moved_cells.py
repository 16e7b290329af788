"""Moves of cells that are infinite or NaN: a list's cells, and gradients, are its module's."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from over_ranks import AdoptedCase, swept
from referee import Run, loss_of
from shared_out import Result, assert_same, grids, shared_out, weights_like
from sweeps import swept_map
from torch import Tensor, nn

import tilenet
from tilenet.adoption.adopt import Adopted
from tilenet.geometry.layers import Conv
from tilenet.model.cellwise import taps_of
from tilenet.parallel.exchange.copied import takes_copy
from tilenet.storage.layer_json import layer_from_json, layer_to_json

pytestmark = pytest.mark.ranks(1, 2, 4)

Move = Callable[[Tensor], Tensor]


def again(factor: int) -> Move:
    return lambda x: F.interpolate(x, scale_factor=float(factor))


def smaller(step: int) -> Move:
    def move(x: Tensor) -> Tensor:
        size = x.shape[2] // step, x.shape[3] // step
        return F.interpolate(x, size, mode="bilinear")

    return move


def unpooled(width: int) -> Move:
    def move(x: Tensor) -> Tensor:
        values, places = F.max_pool2d(x, width, return_indices=True)
        return F.max_unpool2d(values, places, width)

    return move


# Moves of infinite cells, and moves back of the cells once they are finite.
MOVES: dict[str, tuple[Move, Move]] = {
    "padded": (lambda x: F.pad(x, (2, 1, 2, 1)), lambda x: x[..., 2:-1, 2:-1]),
    "cropped": (lambda x: x[..., 2:-1, 2:-1], lambda x: F.pad(x, (2, 1, 2, 1))),
    "cropped above": (lambda x: x[..., 1:, 1:], lambda x: F.pad(x, (1, 0, 1, 0))),
    "differences": (lambda x: x[..., 1:, :-1] - x[..., :-1, 1:], lambda x: F.pad(x, (0, 1, 1, 0))),
    "shifted": (lambda x: F.pad(x, (1, -1, 1, -1)), lambda x: x),
    "every other": (lambda x: x[..., ::2, 1::2], again(2)),
    "unshuffled": (lambda x: F.pixel_unshuffle(x, 2), lambda x: F.pixel_shuffle(x, 2)),
    "middles of 3": (smaller(3), again(3)),
    "middles of 4": (smaller(4), again(4)),
    "unpooled": (unpooled(2), lambda x: x),
    "unpooled 3": (unpooled(3), lambda x: x),
}


class Moving(nn.Module):
    """Logarithms of cells, which are −∞ for zeros, are moved and then limited."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.move, self.back = MOVES[name]
        self.head = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        moved = self.move(x.abs().log())
        # −∞ − (−∞) of differences, and the 0 · (−∞) of middles of 3, which torch has too.
        out: Tensor = self.head(self.back(moved.nan_to_num(0.5, 20.0, -20.0)))
        return out


@dataclass(frozen=True)
class WithZeros(AdoptedCase):
    """Images of integers, a block of which are zeros."""

    def inputs(self) -> list[Tensor]:
        images = [(3 * image).round() for image in super().inputs()]
        for image in images:
            image[..., 20:44, 9:40] = 0.0
        return images


def case_of(name: str, grid: tuple[int, int], mode: str) -> tuple[nn.Module, Adopted, WithZeros]:
    torch.manual_seed(4)
    module = Moving(name)
    adopted = tilenet.adopt(module, 3)
    halo = adopted.context.halo_px if mode == "overlap" else 0
    unit = adopted.context.alignment_px
    case = WithZeros(adopted.layers, (60, 84), grid, unit, halo, mode, adopted=adopted)  # type: ignore[arg-type]
    return module.double(), adopted, case


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
def test_shared_out(comm: MPI.Intracomm, name: str, mode: str) -> None:
    module, adopted, case = case_of(name, grids(comm.size)[-1], mode)
    (image,) = case.inputs()
    out = module(image.requires_grad_())
    (weights_like(out) * out.square()).sum().backward()
    assert out.isfinite().all()
    assert image.grad is not None
    assert image.grad.isnan().any()  # 0 · ∞ at zeros
    grads = {ours: module.get_parameter(theirs).grad for ours, theirs in adopted.names.items()}
    found = shared_out(case, comm)
    # A halo's outermost cells get no gradient from a tile: 0 · ∞ there too.
    images = [image.grad.nan_to_num(7.0)] if mode == "exchange" else []
    found.images = [gradient.nan_to_num(7.0) for gradient in found.images[: len(images)]]
    wanted = Result([out.detach()], images, grads, found.running)  # type: ignore[arg-type]
    assert_same(found, wanted, 1e-12, 1e-12, comm)


@pytest.mark.parametrize("name", MOVES)
def test_swept(comm: MPI.Intracomm, name: str) -> None:
    module, adopted, case = case_of(name, (1, comm.size), "exchange")
    (image,) = case.inputs()
    out = module(image)
    loss_of(out).backward()
    wanted = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    found = swept(case, comm, 12, Run(out, image, {}, {}))
    torch.testing.assert_close(found.logits, out.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.weights, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(swept_map(adopted, image), out.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("width", [2, 3])
def test_maxima_of_what_is_no_number_are_put_back(width: int) -> None:
    """A pool takes the last NaN of a window, and the first of equal maxima."""
    adopted = tilenet.adopt(nn.Sequential(Unpooled(width), nn.Conv2d(3, 2, 1)), 3)
    network = adopted.network(torch.float64)
    network[-1] = nn.Identity()
    x = torch.randn(2, 3, 12 * width, 18 * width, dtype=torch.float64).round()
    few = torch.rand(x.shape)
    x[few < 0.2] = torch.nan
    x[few > 0.5] = -torch.inf
    x[few > 0.95] = torch.inf
    torch.testing.assert_close(network(x), Unpooled(width)(x), rtol=0, atol=0, equal_nan=True)


class Unpooled(nn.Module):
    """Maxima, twice as large, where they were."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        values, places = F.max_pool2d(x, self.width, return_indices=True)
        return F.max_unpool2d(2 * values, places, self.width)


@pytest.mark.ranks(1)
def test_other_kernels_are_convolved() -> None:
    adopted = tilenet.adopt(Moving("unshuffled"), 3)
    moves = next(x for x in adopted.layers if isinstance(x, Conv) and x.steps)
    read = layer_from_json(json.loads(json.dumps(layer_to_json(moves))))
    assert isinstance(read, Conv)
    assert taps_of(moves) == taps_of(read) == ((0, 0), (0, 1), (1, 0), (1, 1))
    shifted = tilenet.adopt(Moving("shifted"), 3).layers
    assert [takes_copy(x, 10**9) for x in shifted if isinstance(x, Conv)] == [True, False]
    (_, (_, *numbers), shape), repeat = moves.steps
    of_a_module = ("constant", ("list", *map(float, numbers)), shape)
    two = ("constant", ("list", *numbers[:2], True, *numbers[3:]), shape)
    for other in (
        replace(moves, steps=(of_a_module, repeat)),
        replace(moves, steps=(two, repeat)),
        replace(moves, steps=(*moves.steps, ("neg.default", ("value", 1)))),
        replace(moves, bias=True),
        replace(moves, groups=1, in_channels=1),
    ):
        assert not taps_of(other)
