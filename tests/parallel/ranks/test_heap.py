"""Freed buffers stay with the process: the kernel need not clear new pages for each feature map."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, torch
from tilenet.parallel.ranks.malloc import keep_freed_buffers

class State(ctypes.Structure):  # malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "mapped", "usmblks", "fsmblks", "used", "free",
        "keepcost")]

try:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
except AttributeError:
    sys.exit(9)
mallinfo2.restype = State
if sys.argv[1] == "keep" and not keep_freed_buffers():
    sys.exit(9)
big = torch.empty(40, 1 << 20)  # 160 MiB
mapped = mallinfo2().mapped
del big
print(mapped, mallinfo2().arena)
"""


def state(mode: str) -> tuple[int, int]:
    """Bytes mapped for a 160 MiB buffer alone, and bytes of the heap once it is dropped."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=False
    )
    if ended.returncode == 9:
        pytest.skip("this C library has no mallopt or does not tell its state")
    assert ended.returncode == 0, ended.stderr
    mapped, heap = ended.stdout.split()
    return int(mapped), int(heap)


def test_buffers_are_kept() -> None:
    # What malloc does is asked of malloc: page faults depend on how busy the machine is.
    dropped, kept = state("drop"), state("keep")
    size = 160 << 20
    assert dropped[0] >= size > dropped[1]
    assert kept[0] < size <= kept[1]
