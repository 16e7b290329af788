"""A branch on a size, or a number of images, beyond those that are run with values is refused."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from one_idea import Around
from torch import Tensor, nn

from tilenet.adoption.adopt import adopt
from tilenet.adoption.proof import sizes
from tilenet.errors import TilenetError

Function = Callable[[nn.Module, Tensor], Tensor]

BRANCHES: dict[str, tuple[Function, str]] = {
    "more rows": (lambda m, x: x.relu() if x.shape[2] > 700 else x, "1536 × 2048 px: relu"),
    "more pixels": (
        lambda m, x: x if x.shape[2] * x.shape[3] < 1000**2 else F.avg_pool2d(x, 3, 1, 1),
        "1536 × 2048 px: avg_pool2d",
    ),
    "many rows": (lambda m, x: x.relu() if x.shape[2] > 2**14 else x, "20480 × 128 px: relu"),
    "wide images": (
        lambda m, x: x.relu() if x.shape[3] > 5 * x.shape[2] else x,
        "384 × 8192 px: relu",
    ),
    "sizes between": (
        lambda m, x: x.relu() if 300 < x.shape[2] < 2000 else x,
        "384 × 512 px: relu",
    ),
    "one large image": (
        lambda m, x: x.relu() if len(x) == 1 and x.shape[2] > 400 else x,
        "1536 × 2048 px: relu",
    ),
    "more rows in training": (
        lambda m, x: x.relu() if m.training and x.shape[2] > 2000 else x,
        "2 images of 20480 × 128 px: relu",
    ),
    "more images": (lambda m, x: x.relu() if len(x) > 16 else x, "33 images of 128 × 256 px: relu"),
    "a number": (lambda m, x: x * min(1.0, 512 / x.shape[3]), "1536 × 2048 px: mul"),
    "a whole number": (
        lambda m, x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=x.shape[2] < 9000),
        "20480 × 128 px: avg_pool2d",
    ),
    "a number of images": (lambda m, x: x + (len(x) > 16), "33 images of 128 × 256 px: add"),
    "as many times as rows": (
        lambda m, x: sum((x for _ in range(x.shape[2] // 1000)), x),
        "1536 × 2048 px: add",
    ),
}


def prove(module: nn.Module) -> None:
    modes = {part: part.training for part in module.modules()}
    sizes.prove_sizes(module.double().eval(), modes, 3, 1)


class Grids(nn.Module):
    """Makes coordinates of a size once, and keeps them."""

    def __init__(self, *, grows: bool) -> None:
        super().__init__()
        self.conv, self.grows = nn.Conv2d(3, 4, 3, padding=1), grows
        self.of: dict[int, Tensor] = {}
        self.rows = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        height = x.shape[2]
        if self.grows and len(self.rows) < height:
            self.rows = torch.arange(height, device=x.device, dtype=x.dtype)
        if not self.grows and height not in self.of:
            self.of[height] = torch.arange(height, device=x.device, dtype=x.dtype)
        rows = self.rows[:height] if self.grows else self.of[height]
        return self.conv(x) * (1 + rows[:, None].expand(x.shape[2:]))


@pytest.mark.parametrize("grows", [False, True])
def test_what_is_made_once_for_a_size_is_no_branch(grows: bool) -> None:
    prove(Grids(grows=grows))


class Heavy(nn.Module):
    """Refuses to be moved."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def _apply(self, *_: object, **__: object) -> "Heavy":
        raise RuntimeError("stays where it is")


def test_a_module_that_stays_on_its_device_is_left_alone() -> None:
    sizes.prove_sizes(Heavy().eval(), {}, 3, 1)


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_beyond_the_proof_is_refused(name: str) -> None:
    function, words = BRANCHES[name]
    with pytest.raises(TilenetError, match=rf"same operators at all sizes.*{words} differs"):
        adopt(Around(function), 3)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * float(m.conv.weight.detach().abs().max() > 0),
        lambda m, x: x + torch.zeros(1, 4, 1, 1, device="cpu"),
    ],
)
def test_a_module_that_needs_values_is_left_as_it_is(function: Function) -> None:
    prove(Around(function))


def test_layers_of_one_weight_are_run() -> None:
    shared = nn.Conv2d(4, 4, 1)
    module = Around(lambda m, x: x.relu() if len(x) > 16 else m.two(x), two=nn.Conv2d(4, 4, 1))
    module.two.weight = shared.weight
    with pytest.raises(TilenetError, match="33 images of 128 × 256 px: convolution differs"):
        prove(nn.Sequential(module, shared))


@pytest.mark.parametrize("number", [lambda x: 1 / x.shape[2], lambda x: float("nan"), lambda x: -1])
def test_numbers_that_differ_among_small_images_are_left_to_their_values(
    number: Callable[[Tensor], float],
) -> None:
    prove(Around(lambda m, x: x * number(x)))
