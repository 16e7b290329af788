"""The last line of each benchmark: one JSON object with the machine, the figures and the claims."""

import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["Claim", "at_least", "at_most", "device_stem", "mpiexec", "report"]

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Claim:
    """A ratio measured side by side in one run, or a count, with what it should be."""

    claim: str
    value: float
    goal: float
    holds: bool


def at_most(claim: str, value: float, goal: float) -> Claim:
    """A claim that holds where the value is at most the goal."""
    return Claim(claim, value, goal, value <= goal)


def at_least(claim: str, value: float, goal: float) -> Claim:
    """A claim that holds where the value is at least the goal."""
    return Claim(claim, value, goal, value >= goal)


def report(bench: str, figures: dict[str, Any], claims: list[Claim]) -> None:
    """Print the claims for people, then the JSON line."""
    for claim in claims:
        mark = "holds" if claim.holds else "DOES NOT HOLD"
        print(f"{mark}: {claim.claim} ({claim.value:.4g}, goal {claim.goal:.4g})")
    names = ("torch", "torchgpipe", "mpi4py", "rasterio", "numpy")
    entry = {
        "bench": bench,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {_processor()}",
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in names},
        },
        "figures": figures,
        "claims": [asdict(claim) for claim in claims],
    }
    print(json.dumps(entry))


def device_stem(device: str) -> str:
    """`nvidia-h100-80gb-hbm3`: what results of a bench that names its device are called."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def mpiexec(ranks: int, *arguments: str, timeout: float = 3600) -> str:
    """Run Python on some ranks with one thread each; return what was printed.

    Raises:
        RuntimeError: It failed; with what it said.
    """
    ended = subprocess.run(
        ["mpiexec", "-n", str(ranks), sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(arguments)} on {ranks} ranks failed:\n{ended.stderr}")
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
