"""Modules made from seeds over ranks, in all halo modes, next to the module on the whole image."""

import os

import pytest
from grammar import generate
from mpi4py import MPI
from over_ranks import adopt_once, compare_over_ranks
from referee import mode_of

from tilenet.errors import TilenetError

pytestmark = pytest.mark.ranks((2, 3, 4))

COUNT = int(os.environ.get("GENERATED_MODULES", "12"))
FIRST = int(os.environ.get("GENERATED_FROM", "200"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_module_over_ranks(comm: MPI.Intracomm, seed: int) -> None:
    module = generate(seed)
    adopted = adopt_once(comm, module, mode_of(seed))
    if adopted is None:
        pytest.skip("it is refused")
    for mode in ("overlap", "exchange", "sweep"):
        try:
            wrong = compare_over_ranks(comm, seed, adopted, mode)  # type: ignore[arg-type]
        except TilenetError:
            continue  # in exchange maps may not be shared out as layers ask
        assert not wrong, f"seed {seed} ({mode_of(seed)}, {mode}): {wrong}\n{module.describe()}"
