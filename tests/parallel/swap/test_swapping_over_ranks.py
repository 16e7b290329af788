"""Layers that reach over ranks give the same bits when what they save is swapped."""

from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from mpi4py import MPI
from pairwise import pairs
from shared_out import Case, Result, grids, shared_out

from tilenet import lms
from tilenet.geometry.unet import UNetOptions, unet_layers

pytestmark = pytest.mark.ranks(2, 4)

NETWORKS = {
    "no norm": UNetOptions(poolings=2, base=4, bands=3, classes=3, norm="none"),
    "instance norm": UNetOptions(poolings=2, base=4, bands=3, classes=3, norm="instance"),
    "transposed, group norm": UNetOptions(
        poolings=2, base=4, bands=3, classes=3, norm="group", groups=2, upsampling="transposed"
    ),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    lms.set_enabled_lms(False)
    lms.set_limit_lms(0)
    lms.set_size_lms(1 << 20)


def unequal(found: Result, wanted: Result) -> int:
    """How many tensors differ in any bit."""
    pairs = chain(
        zip(found.outputs, wanted.outputs, strict=True),
        zip(found.images, wanted.images, strict=True),
        ((found.parameters[name], wanted.parameters[name]) for name in wanted.parameters),
        ((found.running[name], wanted.running[name]) for name in wanted.running),
    )
    return sum(not torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "checkpointing", "limit"), pairs(NETWORKS, ("never", "always"), (0, 100_000))
)
def test_exchange(comm: MPI.Intracomm, name: str, checkpointing: str, limit: int) -> None:
    case = Case(
        unet_layers(NETWORKS[name]), (64, 96), grids(comm.size)[-1], unit=4, images=2, partitions=2,
        checkpointing=checkpointing,
    )  # fmt: skip
    wanted = shared_out(case, comm)
    lms.set_size_lms(0)
    lms.set_limit_lms(limit)
    lms.set_enabled_lms(True)
    lms.reset_memory_reclaimed()
    found = shared_out(case, comm)
    assert comm.allreduce(unequal(found, wanted)) == 0
    assert lms.memory_reclaimed() > 0
    del found
    assert lms.memory_active() == 0
