"""A layer that looks beyond a cell is seen, whatever its operators are called."""

import pytest

from tilenet.adoption.proof.cells import prove_cells, without_idle_weights
from tilenet.errors import TilenetError
from tilenet.geometry.layers import Cellwise, Step

MAP, CELLS = ("value", 0), (("size", 1, "H"), ("size", 1, "W"))
TURNED: Step = ("reshape.default", MAP, ("list", ("size", 1, "B"), 4, CELLS[1], CELLS[0]))


@pytest.mark.parametrize(
    "steps",
    [
        (("cumsum.default", MAP, 3),),
        (("flip.default", MAP, ("list", 2)),),
        (("softmax.int", MAP, 2),),
        (("sum.dim_IntList", MAP, ("list", 2), True), ("add.Tensor", MAP, ("value", 1))),
        (TURNED, ("permute.default", ("value", 1), ("list", 0, 1, 3, 2))),
    ],
    ids=str,
)
def test_a_layer_that_looks_beyond_a_cell_is_refused(steps: tuple[Step, ...]) -> None:
    prove_cells((Cellwise(4, 4, steps=(("cumsum.default", MAP, 1),)),))
    with pytest.raises(TilenetError, match="the cells around it change it"):
        prove_cells((Cellwise(4, 4, steps=steps),))


COMPARED: tuple[Step, ...] = (
    ("gt.Tensor", MAP, ("value", 1)),
    ("convert", ("value", 3)),
    ("mul.Tensor", ("value", 4), ("value", 2)),
)


@pytest.mark.parametrize(
    ("second", "trained"), [("scale", [False, True, True]), ("limit", [True, True, True])]
)
def test_weights_that_no_gradient_reaches_are_not_trained(second: str, trained: list[bool]) -> None:
    """But those that learn in another layer are."""
    shapes = ("w0", (4, 1, 1), True), ("w1", (4, 1, 1), True)
    compared = Cellwise(4, 4, weights=shapes, steps=COMPARED)
    scaled = Cellwise(4, 4, weights=shapes[:1], steps=(("mul.Tensor", MAP, ("value", 1)),))
    names = {"0.w0": "limit", "0.w1": "gain", "1.w0": second}
    layers = without_idle_weights((compared, scaled), names)
    assert [flag for layer in layers for _, _, flag in layer.weights] == trained  # type: ignore[attr-defined]


def test_numbers_without_a_root_are_equal() -> None:
    prove_cells((Cellwise(4, 4, steps=(("sqrt.default", MAP),)),))


def test_maps_of_one_cell_stay_as_they_are() -> None:
    gate = Cellwise(4, 4, ("a",), 1, (4,), (0,), steps=(("mul.Tensor", MAP, ("value", 1)),))
    prove_cells((gate,))
