"""Rank 0's tensors, on all ranks, bit for bit."""

import pytest
import torch
from mpi4py import MPI

from tilenet.parallel.ranks import share

pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.mark.parametrize("piece_bytes", [1, 7, 8, share.PIECE_BYTES])
def test_tensors_of_any_kind(
    comm: MPI.Intracomm, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "PIECE_BYTES", piece_bytes)
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64)
    tensors = {
        "plain": values.float(),
        "channels last": values.to(memory_format=torch.channels_last),
        "half": values.bfloat16(),
        "complex": torch.complex(values, -values),
        "yes": values > 0,
        "one": torch.tensor(2**40 + 1),
        "nothing": torch.empty(0, 3),
        "nan": torch.tensor([torch.nan, -0.0]),
        "ünï \ud800": torch.ones(1, dtype=torch.uint8),
    }
    result = share.share_tensors(tensors if comm.rank == 0 else {}, comm)
    assert list(result) == list(tensors)
    for name, tensor in tensors.items():
        assert result[name].dtype == tensor.dtype
        assert result[name].shape == tensor.shape
        assert torch.equal(result[name].nan_to_num(7), tensor.nan_to_num(7)), name
