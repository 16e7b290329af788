"""A few random runs in random ways; `make fuzz` makes others."""

from pathlib import Path

import pytest
from mpi4py import MPI
from random_runs import compare_ways

# Between them: crops, whole images, numbers, polygons, other grids, modules, all halo modes.
SEEDS = (1, 10, 11, 22, 24)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_ways_give_what_the_plainest_gives(
    comm: MPI.Intracomm, shared_path: Path, seed: int
) -> None:
    outcomes = [words for words, _ in compare_ways(comm, seed, shared_path / str(seed))]
    assert [words for words in outcomes if words.startswith("differs")] == []
    assert "agrees" in outcomes
