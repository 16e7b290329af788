"""A layer that looks beyond a cell is seen, whatever its operators are called."""

import pytest

from tilenet.adoption.prove_cells import prove_cells
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


def test_numbers_without_a_root_are_equal() -> None:
    prove_cells((Cellwise(4, 4, steps=(("sqrt.default", MAP),)),))


def test_maps_of_one_cell_stay_as_they_are() -> None:
    gate = Cellwise(4, 4, ("a",), 1, (4,), (0,), steps=(("mul.Tensor", MAP, ("value", 1)),))
    prove_cells((gate,))
