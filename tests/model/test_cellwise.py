"""Layers of operators that a file may hold: what they are, and what is refused of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Cellwise, Conv, Step
from tilenet.geometry.legal_layers import check_layers
from tilenet.model.cellwise import CellwiseModule, cellwise_layer, check_kernel, find_operator

MAP = "value", 0
SILU: tuple[Step, ...] = (("silu.default", MAP),)


def layer_of(*steps: Step, out: int = 4) -> Cellwise:
    return Cellwise(4, out, steps=steps)


@pytest.mark.parametrize(
    "name",
    [
        "relu_.default", "bernoulli.default", "rand_like.default", "conv3d.default", "sort.default",
        "set_.source_Storage", "from_file.default", "silu", "silu.", ".default", "__class__.x",
        "silu.__call__", "add.out", "dropout.default", "resize_.default", "max_pool2d.default",
    ],
)  # fmt: skip
def test_only_operators_that_act_on_cells_are_known(name: str) -> None:
    assert find_operator(name) is None
    with pytest.raises(TilenetError, match="known"):
        cellwise_layer(layer_of((name, MAP)))


@pytest.mark.parametrize(
    "step",
    [
        ("sum.dim_IntList", MAP, ("list", 1)),
        ("select.int", MAP, 1, 0),
        ("mul.Tensor", MAP),
        ("repeat.default", MAP, ("list", 1, 1, 2, 1)),
        ("repeat.default", MAP, ("list", 1, 10**9, 1, 1)),
        ("reshape.default", MAP, ("list", 4, 2, 3, 5)),
    ],
    ids=str,
)
def test_a_list_makes_the_map_that_its_layer_says(step: Step) -> None:
    with pytest.raises(TilenetError, match="make the map that it says"):
        cellwise_layer(layer_of(step))


GOOD = Cellwise(
    4,
    4,
    weights=(("w0", (4, 1, 1), True),),
    steps=(("mul.Tensor", MAP, ("value", 1)), *((("add.Tensor", ("value", 2), 0.5),))),
)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(GOOD, steps=()),
        replace(GOOD, steps=(("mul.Tensor", ("value", 2), 2.0),)),
        replace(GOOD, steps=(("mul.Tensor", ("value", -1), 2.0),)),
        replace(GOOD, steps=((3, MAP),)),
        replace(GOOD, steps=(("mul.Tensor", ("size", 0, "B")),)),
        replace(GOOD, steps=(("mul.Tensor", ("size", 1, "BX")),)),
        replace(GOOD, steps=(("mul.Tensor", MAP, ("other", 3)),)),
        replace(GOOD, steps=(("mul.Tensor", MAP, float("inf")),)),
        replace(GOOD, weights=(("forward", (4, 1, 1), True),)),
        replace(GOOD, weights=(("w0", (-4, 1, 1), True),)),
        replace(GOOD, weights=(("w0", (4, 1, 1)),)),
        replace(GOOD, single=(1,)),
        replace(GOOD, place=1),
        replace(GOOD, channels=(3,)),
        replace(GOOD, kept=("a",), channels=(4,)),
    ],
    ids=str,
)
def test_what_no_layer_is_is_refused_before_it_is_built(wrong: Cellwise) -> None:
    check_layers((GOOD,), 4, 4)
    with pytest.raises(TilenetError, match="follow on one another"):
        check_layers((wrong,), 4, 4)


def test_a_part_of_a_map_does_not_keep_all_of_it() -> None:
    steps = ("chunk.default", MAP, 2, 1), ("item", ("value", 1), 1)
    module = cellwise_layer(layer_of(*steps, out=2))
    x = torch.randn(2, 4, 5, 3)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            y = module(x)
        assert y.equal(x[:, 2:])
        assert y.untyped_storage().nbytes() == 2 * 2 * 5 * 3 * 4


def test_results_go_after_their_last_use() -> None:
    steps: list[Step] = [("silu.default", MAP)]
    steps += [("silu.default", ("value", number)) for number in range(1, 6)]
    steps += [("add.Tensor", ("value", 6), ("value", 2))]
    module = cellwise_layer(layer_of(*steps))
    assert isinstance(module, CellwiseModule)
    assert module._last == ((), (1,), (), (3,), (4,), (5,), ())


def test_backward_reaches_a_kept_map_that_no_gradient_goes_to() -> None:
    layer = Cellwise(4, 4, ("a",), 0, (4,), steps=(("gt.Tensor", MAP, ("value", 1)), CONVERT))
    module = cellwise_layer(replace(layer, steps=(*layer.steps, MULTIPLY)))
    x, kept = (torch.randn(1, 4, 2, 3, requires_grad=True) for _ in range(2))
    y = module.module.compute(x, [kept * 1.0])  # type: ignore[operator, union-attr]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.equal((x > kept).float())
    assert y.grad_fn is not None
    assert any("Mul" in type(one).__name__ for one, _ in y.grad_fn.next_functions)


CONVERT: Step = ("convert", ("value", 2))
MULTIPLY: Step = ("mul.Tensor", ("value", 0), ("value", 3))


KERNEL = Conv(4, 4, 3, padding=1, groups=4, weights=(("w0", (4, 1, 3, 3), True),),
              steps=(("mul.Tensor", ("value", 0), 2.0),))  # fmt: skip


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"steps": (("sum.default", ("value", 0)),)}, r"kernel that the layer has .*make: \(\)"),
        ({"steps": (("mul_.Tensor", ("value", 0), 2.0),)}, "operators that are known"),
        ({"steps": (("rand_like.default", ("value", 0)),)}, "operators that are known"),
        ({"kernel": 5}, r"\(4, 1, 5, 5\), they make: \(4, 1, 3, 3\)"),
        (
            {"steps": (("constant", ("list", 1.0), ("list", 4, 1, 3, 3)),)},
            "they make: ValueError: 1 numbers",
        ),
    ],
)
def test_a_kernel_of_other_operators_or_another_shape_is_refused(
    change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TilenetError, match=sentence):
        check_kernel(replace(KERNEL, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"steps": ()},
        {"steps": (("mul.Tensor", ("value", 1), 2.0),)},
        {"weights": (("forward", (4, 1, 3, 3), True),)},
        {"weights": (("w0", (4, -1, 3, 3), True),)},
    ],
)
def test_a_kernel_takes_the_weights_that_there_are(change: dict[str, Any]) -> None:
    check_layers((KERNEL,), 4, 4)
    with pytest.raises(TilenetError, match="layers must follow on one another"):
        check_layers((replace(KERNEL, **change),), 4, 4)
