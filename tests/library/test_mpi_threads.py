"""An MPI that takes one thread at a time: what needs more is refused, and the rest is done."""

from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from scenes import KEYS, Net

import tilenet
from tilenet.errors import AgreedError


@pytest.mark.ranks(1, 2)
def test_partitions_that_reach_over_ranks_need_an_mpi_for_many_threads(
    scene: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_FUNNELED)
    given: dict[str, Any] = {**KEYS, "steps": 1, "validation": {}}
    tilenet.train(Net(), **given, output="tiles", partitions=2)
    tilenet.train(Net(), **given, output="one", halo_mode="exchange")

    def both() -> None:
        tilenet.train(Net(), **given, output="both", halo_mode="exchange", partitions=2)

    if comm.size == 1:
        both()
        return
    with pytest.raises(AgreedError, match=r"partitions: 2, on cpu; MPI grants less than"):
        both()
