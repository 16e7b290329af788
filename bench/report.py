"""What a bench says: figures and claims; and the jobs that it starts."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = [
    "ROOT", "Claim", "Found", "alone", "at_least", "at_most", "child", "device_stem", "entry",
    "environment", "mpiexec", "on_ranks",
]  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "torchgpipe", "mpi4py", "rasterio", "numpy")


@dataclass(frozen=True)
class Claim:
    """A ratio measured side by side in one run, or a count, with what it should be."""

    claim: str
    value: float
    goal: float
    holds: bool


Found = tuple[dict[str, Any], list[Claim]]


def at_most(claim: str, value: float, goal: float) -> Claim:
    """A claim that holds where the value is at most the goal."""
    return Claim(claim, value, goal, value <= goal)


def at_least(claim: str, value: float, goal: float) -> Claim:
    """A claim that holds where the value is at least the goal."""
    return Claim(claim, value, goal, value >= goal)


def entry(bench: str, found: Found) -> dict[str, Any]:
    """What is kept of a bench: the machine, the versions, the figures and the claims."""
    return {
        "bench": bench,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {_processor()}",
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "figures": found[0],
        "claims": [asdict(claim) for claim in found[1]],
    }


def device_stem(device: str) -> str:
    """`nvidia-h100-80gb-hbm3`: what results of a bench that names its device are called."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def on_ranks(ranks: int, work: Callable[..., Any] | str, *arguments: object, hours: int = 1) -> Any:
    """What a function of a bench, or `MODULE:NAME`, returns on rank 0 of a job of its own."""
    printed = mpiexec(ranks, "-m", "mpi4py", *child(work, *arguments), timeout=3600 * hours)
    return json.loads(printed.splitlines()[-1])


def alone(
    work: Callable[..., Any], *arguments: object, python: str = sys.executable,
    limit_s: float = 3600,
) -> Any:  # fmt: skip
    """What a function of a bench returns in a process of its own."""
    return json.loads(_printed([python, *child(work, *arguments)], limit_s).splitlines()[-1])


def mpiexec(ranks: int, *arguments: object, timeout: float = 3600) -> str:
    """Run Python on some ranks with one thread each; return what was printed.

    Raises:
        RuntimeError: It failed; with what it said.
    """
    command = ["mpiexec", "-n", str(ranks), sys.executable, *map(str, arguments)]
    return _printed(command, timeout)


def environment() -> dict[str, str]:
    """That of all that a bench starts: one thread, and this repository."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def child(work: Callable[..., Any] | str, *arguments: object) -> list[str]:
    """Arguments of a Python that runs a function of a bench, and prints what that returns."""
    place = work if isinstance(work, str) else f"{work.__module__}:{work.__name__}"
    return ["-m", "bench", "child", place, json.dumps(arguments, default=str)]


def _printed(command: list[str], timeout: float) -> str:
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT,
        env=environment(),
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr}")
    return ended.stdout


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
