"""Each kind of layer, shared out over ranks, gives what it gives on the whole image."""

import pytest
from mpi4py import MPI
from shared_out import Case, assert_same, grids, shared_out, whole

from tilenet.geometry.layers import Conv, Layer, Norm, Pool, TransposedConv, Upsample

pytestmark = pytest.mark.ranks(2, 3, 4)

# Those that peers get wrong, or refuse (peers' tables), among them.
LAYERS: dict[str, tuple[Layer, ...]] = {
    "convolution 3": (Conv(2, 3, padding=1, bias=True),),
    "convolution 5": (Conv(2, 3, kernel=5, padding=2, bias=True),),
    "convolution 7, dilation 2": (Conv(2, 3, kernel=7, dilation=2, padding=6),),
    "convolution 3, dilation 3": (Conv(2, 3, dilation=3, padding=3, bias=True),),
    "convolution 1": (Conv(2, 3, kernel=1, bias=True),),
    "stride 2": (Conv(2, 3, stride=2, padding=1, bias=True),),
    "stride 3, kernel 5": (Conv(2, 3, kernel=5, stride=3, padding=2, bias=True),),
    "even kernel, stride 2": (Conv(2, 3, kernel=4, stride=2, padding=1),),
    "unpadded convolution": (Conv(2, 3, kernel=5, bias=True),),
    "wide padding": (Conv(2, 3, kernel=3, padding=3),),
    "max-pool 2": (Pool(2, 2),),
    "overlapping max-pool": (Pool(2, 2, kernel=3, stride=2, padding=1),),
    "overlapping average pool": (Pool(2, 2, kernel=3, stride=2, padding=1, mode="average"),),
    "average pool 3 of stride 1": (Pool(2, 2, kernel=3, stride=1, padding=1, mode="average"),),
    "nearest": (Upsample(2, 2),),
    "bilinear": (Upsample(2, 2, mode="bilinear"),),
    "bilinear by 3": (Upsample(2, 2, factor=3, mode="bilinear"),),
    "bicubic": (Upsample(2, 2, mode="bicubic"),),
    "bicubic by 3": (Upsample(2, 2, factor=3, mode="bicubic"),),
    "transposed k2 s2": (TransposedConv(2, 3, bias=True),),
    "transposed k3 s2 p1": (TransposedConv(2, 3, 3, 2, 1, 1, bias=True),),
    "transposed k4 s2 p1": (TransposedConv(2, 3, 4, 2, 1, bias=True),),
    "transposed k3 s1 p1": (TransposedConv(2, 3, 3, 1, 1, bias=True),),
    "instance norm": (Norm(2, 2, affine=True),),
    "group norm": (Norm(6, 6, norm="group", groups=2, affine=True),),
    "batch norm": (Norm(2, 2, norm="batch", affine=True),),
}
# A layer before and behind, so that gradients arrive as they do in a network.
AROUND = {"instance norm", "group norm", "batch norm"}


def network(name: str) -> tuple[Layer, ...]:
    layers = LAYERS[name]
    wide = layers[0].in_channels
    return (Conv(2, wide, padding=1), *layers, Conv(layers[-1].out_channels, 2, padding=1))


@pytest.mark.parametrize("size", [(61, 83), (96, 64)], ids=["odd", "even"])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(comm: MPI.Intracomm, name: str, size: tuple[int, int]) -> None:
    for grid in grids(comm.size):
        case = Case(network(name), size, grid)
        assert_same(shared_out(case, comm), whole(case), 1e-13, 1e-12, comm)
