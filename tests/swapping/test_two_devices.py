"""Devices that are no CPUs, and whose tensors no operator takes with a CPU's, change no result."""

import os
import subprocess
import sys
from pathlib import Path


def run(program: str, *arguments: str, start: tuple[str, ...] = ()) -> None:
    # What this process imports from, too.
    paths = os.pathsep.join(path for path in sys.path if path)
    result = subprocess.run(
        [*start, sys.executable, str(Path(__file__).with_name(program)), *arguments],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_pipelines_over_two_devices() -> None:
    run("on_two_devices.py")


def test_runs_on_a_device_that_is_neither_a_cpu_nor_cuda(tmp_path: Path) -> None:
    run("on_second_device_alone.py", str(tmp_path), start=("mpiexec", "-n", "2"))
