"""The maximum over blocks is torch's, values and gradients, without indices."""

import pytest
import torch
from torch import Tensor

from tilenet.geometry.layers import Pool
from tilenet.model.modules import BlockMaxPool, block_max
from tilenet.model.network import build_network

SHAPES = ((1, 1, 2, 2), (3, 5, 8, 6), (2, 3, 9, 7), (1, 4, 2, 13), (2, 2, 5, 4))


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient_of(pool: object, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and the gradient of its weighted sum."""
    x = x.clone().requires_grad_()
    y = pool(x)  # type: ignore[operator]
    return y, torch.autograd.grad(y, x, weights)[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("few_values", [False, True], ids=["random", "equal cells"])
def test_values_and_gradients_are_torchs(shape: tuple[int, ...], few_values: bool) -> None:
    x = drawn(*shape, dtype=torch.float64)
    x = x.round() if few_values else x
    size = *shape[:2], shape[2] // 2, shape[3] // 2
    weights = drawn(*size, seed=2, dtype=torch.float64)
    y, gradient = gradient_of(block_max, x, weights)
    wanted, wanted_gradient = gradient_of(torch.nn.MaxPool2d(2), x, weights)
    assert torch.equal(y, wanted)
    assert torch.equal(gradient, wanted_gradient)
    with torch.inference_mode():
        assert torch.equal(block_max(x), wanted)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions_and_orders_of_memory(
    dtype: torch.dtype, order: torch.memory_format
) -> None:
    x = drawn(2, 3, 6, 10, dtype=dtype).contiguous(memory_format=order)
    weights = drawn(2, 3, 3, 5, seed=2, dtype=dtype)
    found, wanted = (gradient_of(pool, x, weights) for pool in (block_max, torch.nn.MaxPool2d(2)))
    for ours, torchs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, torchs)


def test_what_is_not_finite_stays_where_torch_has_it() -> None:
    x = drawn(1, 2, 4, 6)
    x[0, 0, 1, 2], x[0, 1, 0, 0], x[0, 1, 2:, 4:] = float("nan"), float("inf"), -float("inf")
    assert torch.equal(block_max(x).isnan(), torch.nn.functional.max_pool2d(x, 2).isnan())
    assert torch.equal(block_max(x).nan_to_num(), torch.nn.functional.max_pool2d(x, 2).nan_to_num())


def test_a_gradient_that_overflowed_stays_seen() -> None:
    x, weights = drawn(1, 2, 4, 6), drawn(1, 2, 2, 3, seed=2)
    weights[0, 0, 1, 1] = float("inf")
    _, gradient = gradient_of(block_max, x, weights)
    _, wanted = gradient_of(torch.nn.MaxPool2d(2), x, weights)
    beside = torch.ones_like(wanted, dtype=torch.bool)
    beside[0, 0, 2:, 2:4] = False
    assert torch.equal(gradient[beside], wanted[beside])
    assert not gradient[~beside].isfinite().all()


def test_backward_keeps_the_input_alone() -> None:
    x = drawn(1, 3, 6, 8).requires_grad_()
    kept = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = block_max(x)
    assert [one.data_ptr() for one in kept] == [x.data_ptr()]
    assert y.shape == (1, 3, 3, 4)


@pytest.mark.parametrize(
    ("pool", "ours"),
    [
        (Pool(4, 4), True),
        (Pool(4, 4, 3, 3), False),
        (Pool(4, 4, 3, 2, 1), False),
        (Pool(4, 4, 2, 1), False),
        (Pool(4, 4, mode="average"), False),
    ],
)
def test_only_blocks_of_two_have_an_operator_of_their_own(pool: Pool, ours: bool) -> None:
    (module,) = build_network((pool,))
    assert (type(module) is BlockMaxPool) == ours == pool.in_blocks
