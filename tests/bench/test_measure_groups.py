"""What is measured of layer groups is what happens when they keep, swap or are computed again."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bench.swapping.measure import measure_groups
from tilenet.errors import TilenetError
from tilenet.parallel.swap.host_pool import FileSlabs
from tilenet.parallel.swap.swapper import Swapper


def test_groups_that_write_over_their_input_may_not_be_computed_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.ReLU(inplace=True), nn.Linear(30, 30))
    x = torch.linspace(-1, 1, 120).view(4, 30)
    swapper = Swapper(0, 0, 2, FileSlabs(str(tmp_path)))
    found = measure_groups(list(model), lambda: model(x).sum().backward(), swapper)
    assert [one.may_checkpoint for one in found] == [True, False, True]


def test_bytes_in_backward(tmp_path: Path) -> None:
    """Of chains whose needs are known; a map has 12 800 bytes, a matrix 4096."""
    torch.manual_seed(3)
    size, matrix = 100 * 32 * 4, 32 * 32 * 4
    groups = [nn.Linear(32, 32, bias=False) for _ in range(9)]
    model = nn.Sequential(*groups, nn.SiLU())
    x = torch.randn(100, 32, requires_grad=True)
    swapper = Swapper(0, 0, 2, FileSlabs(str(tmp_path)))
    found = measure_groups(list(model), lambda: model(x).sin().sum().backward(), swapper)
    # The gradients of output and input, and of one matrix, not of those before.
    for one in found[:-1]:
        assert one.saved_bytes == size
        assert 3 * size <= one.backward_bytes <= 3 * size + 2 * matrix
    assert found[-1].saved_bytes == size
    assert found[-1].backward_bytes == 3 * size


def test_a_large_group_does_not_count_for_those_before_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sigmoid(), nn.Upsample(scale_factor=8), nn.Tanh())
    x = torch.linspace(-1, 1, 1800).view(1, 2, 30, 30).requires_grad_()
    swapper = Swapper(0, 0, 2, FileSlabs(str(tmp_path)))
    found = measure_groups(list(model), lambda: model(x).sum().backward(), swapper)
    sizes = [x.nbytes * factor for factor in (1, 0, 64)]
    assert [one.saved_bytes for one in found] == sizes
    assert [one.forward_bytes for one in found] == [2 * x.nbytes, 64 * x.nbytes, 128 * x.nbytes]
    loss = 4  # bytes of its gradient, which autograd holds to the end
    assert found[0].backward_bytes == 3 * x.nbytes + loss
    assert found[1].backward_bytes == 65 * x.nbytes + loss
    assert found[2].backward_bytes >= 128 * x.nbytes


def test_a_group_that_is_never_called_is_refused(tmp_path: Path) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    swapper = Swapper(0, 0, 2, FileSlabs(str(tmp_path)))
    with pytest.raises(TilenetError, match=r"never called: a Tanh"):
        measure_groups([model, nn.Tanh()], lambda: model(x).sum().backward(), swapper)
