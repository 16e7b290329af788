"""Norms of pixels far from zero keep their digits; messages of layers keep apart."""

import numpy as np
import pytest
import torch
from mpi4py import MPI
from shared_out import Case, grids
from test_adjoints import plain_norm
from torchgpipe.skip.layout import inspect_skip_layout
from torchgpipe.skip.tracker import use_skip_tracker

from tilenet.geometry.layers import Conv, Norm
from tilenet.geometry.windows import Window
from tilenet.model.network import build_network
from tilenet.model.origin import Origin, OriginTracker
from tilenet.parallel.exchange.layers import SpatialContext
from tilenet.parallel.exchange.norm import Cells, WholeImageNorm

pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.mark.parametrize("norm", ["instance", "group", "batch"])
@pytest.mark.parametrize("level", [40_000, 65_000_000])
def test_float32_far_from_zero(comm: MPI.Intracomm, norm: str, level: int) -> None:
    """Whole numbers, as of uint16, that float32 holds: what is lost, the norm has lost.

    A mean rounded to float32 is wrong by half a unit in its last place, here 2⁻⁹ or 2.
    """
    if comm.size == 1 and norm != "batch":
        pytest.skip("torch's own module computes, and loses what it loses")
    layer = Norm(6, 6, norm=norm, groups=2, affine=True)  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    spread = 5 if level < 10**6 else 40
    values = level + spread * rng.integers(-3, 4, (2, 6, 7 * comm.size, 23))
    whole = torch.from_numpy(values.astype(np.float32))
    assert np.ptp(whole.numpy()) > spread
    affine = torch.linspace(1, 2, 6, dtype=torch.float64)
    exact = whole.double().requires_grad_()
    wanted = plain_norm(exact, layer, affine, affine)
    weights = torch.linspace(-1, 2, wanted.numel(), dtype=torch.float64).view_as(wanted).sin()
    wanted.backward(weights)

    rows = slice(7 * comm.rank, 7 * comm.rank + 7)
    module = build_network((layer,), 1, torch.float32)[0]
    with torch.no_grad():
        module.weight.copy_(affine)  # type: ignore[operator]
        module.bias.copy_(affine)  # type: ignore[operator]
    cells = Cells((Window(0, 0, 7, 23),) * 2, (0, 1))
    x = whole[:, :, rows].clone().requires_grad_()
    out = WholeImageNorm(module, layer, lambda: cells, comm)(x)
    out.backward(weights[:, :, rows].float())
    assert x.grad is not None
    assert exact.grad is not None
    gaps = (
        float((out.detach() - wanted[:, :, rows].detach()).abs().max()),
        float((x.grad - exact.grad[:, :, rows]).abs().max() / exact.grad.abs().max()),
    )
    worst = [comm.allreduce(gap, op=MPI.MAX) for gap in gaps]
    assert max(worst) <= 2e-6


def test_each_layer_and_micro_batch_has_tags_of_its_own(comm: MPI.Intracomm) -> None:
    layers = (Conv(1, 1, padding=1),) * 40
    one = Case(layers, (20 * comm.size, 20), grids(comm.size)[-1])
    around = SpatialContext(layers, [25, 15], comm)
    layout = inspect_skip_layout([])
    tags = []
    for micro_batch in range(20):
        origin = Origin((3,), one.tiling, (comm.rank,), micro_batch)
        with use_skip_tracker(OriginTracker(layout, origin)):
            tags += [around.exchange(layer).tag for layer in range(40)]
    both_ways = {tag + way for tag in tags for way in (0, 1)}
    assert len(both_ways) == 2 * 20 * 40
    assert min(both_ways) >= 0
    assert max(both_ways) <= 32_767  # MPI's least upper bound
    channels = {id(around._channels[around._partition(layer)]) for layer in range(40)}
    assert len(channels) == 2  # a communicator for each partition
    around.close()
