"""The pool that tensors are swapped to: parts, limits, and what is left of it."""

import errno
import os
import resource
import signal
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from tilenet.errors import TilenetError
from tilenet.parallel.swap.host_pool import FileSlabs, PinnedSlabs, SlabPart

KIB = 1024


def slabs(folder: Path, limit: int | None = None, each: int = 64 * KIB) -> FileSlabs:
    return FileSlabs(str(folder), limit, each)


def test_the_first_part_that_fits_is_taken(tmp_path: Path) -> None:
    pool = slabs(tmp_path)
    parts = [pool.take(size) for size in (1, 3000, 512, 9000, 100)]
    assert [(p.start, p.size) for p in parts] == [
        (0, 512), (512, 3072), (3584, 512), (4096, 9216), (13312, 512),
    ]  # fmt: skip
    assert pool.used_bytes == 512 + 3072 + 512 + 9216 + 512
    pool.give_back(parts[1])
    pool.give_back(parts[3])
    assert pool.take(2000) == SlabPart(0, 512, 2048)
    assert pool.take(1024) == SlabPart(0, 2560, 1024)
    assert pool.take(1024) == SlabPart(0, 4096, 1024)
    assert pool.total_bytes == 64 * KIB


@pytest.mark.parametrize("order", permutations(range(3)))
def test_neighbours_that_are_free_become_one(tmp_path: Path, order: tuple[int, ...]) -> None:
    pool = slabs(tmp_path)
    parts = [pool.take(20 * KIB) for _ in range(3)]
    rest = pool.take(4 * KIB)
    for number in order:
        pool.give_back(parts[number])
    assert pool.take(60 * KIB) == SlabPart(0, 0, 60 * KIB)
    assert pool.total_bytes == 64 * KIB
    assert rest.start == 60 * KIB


def test_parts_of_two_slabs_stay_two(tmp_path: Path) -> None:
    pool = slabs(tmp_path)
    parts = [pool.take(64 * KIB) for _ in range(2)]
    for part in parts:
        pool.give_back(part)
    pool.take(65 * KIB)
    assert pool.total_bytes == (64 + 64 + 65) * KIB
    # Nor are two that end where another begins, in another slab.
    pool = slabs(tmp_path)
    first, _, _, last = [pool.take(size * KIB) for size in (20, 44, 20, 44)]
    assert (first, last) == (SlabPart(0, 0, 20 * KIB), SlabPart(1, 20 * KIB, 44 * KIB))
    pool.give_back(first)
    pool.give_back(last)
    assert pool.take(50 * KIB).slab == 2


def test_parts_never_share_a_byte(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    pool = slabs(tmp_path)
    held: list[tuple[SlabPart, int, int]] = []
    for turn in range(600):
        if held and rng.random() < 0.48:
            part, size, value = held.pop(int(rng.integers(len(held))))
            assert (pool.bytes_of(part, size) == value).all()
            pool.give_back(part)
        else:
            size = int(rng.integers(1, 30 * KIB))
            part = pool.take(size)
            pool.bytes_of(part, size).fill_(turn % 251)
            held.append((part, size, turn % 251))
        assert pool.used_bytes == sum(part.size for part, _, _ in held)
    for part, _, _ in held:
        pool.give_back(part)
    assert pool.used_bytes == 0
    assert len(pool._free) == len(pool._slabs) > 4
    assert sum(part.size for part in pool._free) == pool.total_bytes


def test_the_limit_is_that_of_all_slabs(tmp_path: Path) -> None:
    pool = slabs(tmp_path, limit=100 * KIB)
    part = pool.take(60 * KIB)
    pool.take(30 * KIB)  # in a slab of what the limit leaves
    assert pool.total_bytes == 100 * KIB
    with pytest.raises(TilenetError, match=r"share \(needed: 0\.1 MiB, limit: 0\.1 MiB\); raise"):
        pool.take(20 * KIB)
    pool.give_back(part)
    pool.take(20 * KIB)
    assert pool.total_bytes == 100 * KIB


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_and_nothing_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    pool = slabs(tmp_path)
    part = pool.take(60 * KIB)
    pool.bytes_of(part, 60 * KIB).fill_(7)

    def full(file: int, start: int, size: int) -> None:
        os.ftruncate(file, start + size // 2)  # as far as it went
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TilenetError, match=f"no room for 0.1 MiB, {os.strerror(code)}"):
        pool.take(60 * KIB)
    monkeypatch.undo()
    assert os.fstat(pool._file.fileno()).st_size == pool.total_bytes == 64 * KIB
    pool.bytes_of(pool.take(60 * KIB), 60 * KIB).fill_(9)
    assert (pool.bytes_of(part, 60 * KIB) == 7).all()


def test_an_error_of_another_kind_is_not_dressed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(OSError, match="broken"):
        slabs(tmp_path).take(1)


def test_a_file_that_may_not_grow_is_a_full_disk(tmp_path: Path) -> None:
    """The system's own refusal, of pages that are reserved; of pages touched it were a signal."""
    program = """
import resource, sys
from tilenet.errors import TilenetError
from tilenet.parallel.swap.host_pool import FileSlabs
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
pool = FileSlabs(sys.argv[1], slab_bytes=65536)
pool.bytes_of(pool.take(60_000), 60_000).fill_(1)
try:
    pool.take(60_000)
except TilenetError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "must fit the disk" in done.stdout
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TilenetError, match=rf"writable \(.*{folder}: .*\); choose another"):
        slabs(tmp_path / folder)


def test_a_killed_run_leaves_nothing_behind(tmp_path: Path) -> None:
    program = """
import sys
from tilenet.parallel.swap.host_pool import FileSlabs
pool = FileSlabs(sys.argv[1])
pool.bytes_of(pool.take(1 << 20), 1 << 20).fill_(1)
print("swapped", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"swapped\n"
        seen = os.listdir(tmp_path)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert seen == os.listdir(tmp_path) == []


def test_closing_gives_the_file_back(tmp_path: Path) -> None:
    pool = slabs(tmp_path)
    part = pool.take(10)
    file = f"/proc/self/fd/{pool._file.fileno()}"
    assert str(tmp_path) in os.readlink(file)
    pool.close()
    assert not os.path.exists(file) or str(tmp_path) not in os.readlink(file)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert pool.used_bytes == pool.total_bytes == 0
    assert part.size == 512


@pytest.mark.gpu
def test_pinned_slabs_are_pinned() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, torch sees none")
    pool = PinnedSlabs(slab_bytes=64 * KIB)
    assert pool.bytes_of(pool.take(1000), 1000).is_pinned()
    assert pool.suits(torch.device("cuda"))
    assert not pool.suits(torch.device("cpu"))


@pytest.mark.parametrize("limit", [None, 40_000 * KIB, 1 << 25])
def test_no_more_is_locked_than_is_counted(
    monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """torch's pinned allocator rounds each block up to a power of two."""
    locked: list[int] = []
    empty = torch.empty

    def pinned(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        locked.append(1 << (size - 1).bit_length())
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", pinned)
    rng = np.random.default_rng(3)
    pool, refused = PinnedSlabs(limit, 64 * KIB), 0
    for _ in range(300):
        try:
            pool.take(int(rng.integers(1, 500 * KIB)))
        except TilenetError:
            refused += 1
        assert sum(locked) == pool.total_bytes
        assert limit is None or pool.total_bytes <= limit
    assert len(locked) < 150
    if limit is None:
        assert refused == 0
        assert pool.used_bytes > 0.6 * pool.total_bytes
    else:
        assert refused > 0
        assert pool.used_bytes > 0.7 * limit


def test_a_large_pool_has_few_slabs(tmp_path: Path) -> None:
    """Each holds a file descriptor."""
    pool = slabs(tmp_path, each=4 * KIB)
    for _ in range(5000):
        pool.take(4 * KIB)
    assert pool.total_bytes >= 5000 * 4 * KIB
    assert len(pool._slabs) < 70
