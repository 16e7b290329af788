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
    "more rows": (lambda m, x: x.relu() if x.shape[2] > 700 else x, "8192 × 16384 px: relu"),
    "more pixels": (
        lambda m, x: x if x.shape[2] * x.shape[3] < 3000**2 else F.avg_pool2d(x, 3, 1, 1),
        "8192 × 16384 px: avg_pool2d",
    ),
    "more columns in evaluation": (
        lambda m, x: x.relu() if not m.training and x.shape[3] > 2000 else x,
        "8192 × 16384 px: relu",
    ),
    "more images": (lambda m, x: x.relu() if len(x) > 16 else x, "64 images of 128 × 256 px: relu"),
    "as many times as rows": (
        lambda m, x: sum((x for _ in range(x.shape[2] // 1000)), x),
        "8192 × 16384 px: add",
    ),
}


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
    sizes.prove_sizes(Around(function).double().to("meta"), 3, 1)


def test_layers_of_one_weight_are_run() -> None:
    shared = nn.Conv2d(4, 4, 1)
    module = Around(lambda m, x: x.relu() if len(x) > 16 else m.two(x), two=nn.Conv2d(4, 4, 1))
    module.two.weight = shared.weight
    with pytest.raises(TilenetError, match="64 images of 128 × 256 px: convolution differs"):
        sizes.prove_sizes(nn.Sequential(module, shared).double().to("meta"), 3, 1)
