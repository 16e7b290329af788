"""Partitions on two devices, of which no operator takes tensors of both, change no result."""

import os
import subprocess
import sys
from pathlib import Path


def test_pipelines_over_two_devices() -> None:
    program = Path(__file__).with_name("on_two_devices.py")
    # What this process imports from, too.
    paths = os.pathsep.join(path for path in sys.path if path)
    result = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
