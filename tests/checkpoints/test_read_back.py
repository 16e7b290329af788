"""What was saved is compared with what the disk gives back, to the last bit."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tilenet.storage.checksums import DTYPES, differing_files

NAME = "weights.safetensors"


def tensors() -> dict[str, torch.Tensor]:
    made = {str(dtype): torch.arange(-3, 4).to(dtype).reshape(7, 1) for dtype in DTYPES}
    made["nan"] = torch.tensor([float("nan"), 0.0, -0.0])
    made["scalar"] = torch.tensor(3.0)
    made["empty"] = torch.zeros(0, 4)
    return made | {"large": torch.arange(700_000, dtype=torch.float32)}  # of several pieces


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / NAME, {"format": "pt"})
    return tmp_path / NAME


def differs(path: Path, values: dict[str, torch.Tensor]) -> bool:
    return differing_files(path.parent, {NAME: values}, {}) == [NAME]


def test_tensors_of_any_dtype_are_the_same(saved: Path) -> None:
    assert not differs(saved, tensors())


@pytest.mark.parametrize("name", list(tensors()))
def test_another_value_dtype_shape_or_name_differs(saved: Path, name: str) -> None:
    good = tensors()[name]
    if good.numel():
        other = good.clone().reshape(-1)
        other.view(torch.uint8)[-1] ^= 1
        assert differs(saved, tensors() | {name: other.reshape(good.shape)})
    assert differs(saved, tensors() | {name: good.reshape(1, *good.shape)})
    others = [dtype for dtype in DTYPES if dtype != good.dtype]
    assert all(differs(saved, tensors() | {name: good.to(other)}) for other in others)
    assert differs(saved, {key: value for key, value in tensors().items() if key != name})
    assert differs(saved, tensors() | {"more": good})


def test_a_zero_with_another_sign_differs(saved: Path) -> None:
    assert differs(saved, tensors() | {"nan": torch.tensor([float("nan"), -0.0, 0.0])})


def test_any_byte_that_is_lost_added_or_turned_is_seen(saved: Path) -> None:
    data = saved.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for size in (0, 7, 8, 8 + length // 2, 8 + length, len(data) - 1):
        saved.write_bytes(data[:size])
        assert differs(saved, tensors())
    saved.write_bytes(data + b"\0")
    assert differs(saved, tensors())
    for place in (0, 5, 7, 8, 8 + length, (8 + length + len(data)) // 2, len(data) - 1):
        turned = bytearray(data)
        turned[place] ^= 0x10
        saved.write_bytes(turned)
        assert differs(saved, tensors()), place


@pytest.mark.parametrize("header", [[], 3, {"scalar": 3}, {"scalar": {"data_offsets": "ab"}}])
def test_headers_of_other_things_differ(saved: Path, header: object) -> None:
    text = json.dumps(header).encode()
    saved.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    assert differs(saved, {"scalar": torch.tensor(3.0)})
