"""Freed buffers are used again: the kernel need not clear new pages for each feature map."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from tilenet.parallel.heap import keep_freed_buffers
if sys.argv[1] == "keep" and not keep_freed_buffers():
    sys.exit(9)
torch.set_num_threads(1)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.randn(40, 1 << 20)
before = faults()
for _ in range(20):
    torch.randn(40, 1 << 20)  # 160 MiB, dropped at once
print(faults() - before)
"""


def faults(mode: str) -> int:
    """Pages that the kernel had to bring while buffers were made and dropped."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=False
    )
    if ended.returncode == 9:
        pytest.skip("this C library has no mallopt")
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


def test_buffers_are_kept() -> None:
    assert faults("keep") < faults("drop") / 10
