"""How does `tilenet predict` compare with sliding windows whose overlaps are blended?

    python -m bench.speed.mapping [--quick] [--monai PYTHON]

PYTHON is one with monai beside torch, rasterio and what else tilenet needs. The same networks map
the same image (2048², 4 bands of uint16; quick: 640²), without norm and with batch norm: tilenet,
which reads a halo around own windows and writes a cloud-optimised GeoTIFF, and MONAI's
`sliding_window_inference` with windows as large as our own ones, overlapping by a quarter, blended
by constant and by Gaussian weights. In turns, each in a process of its own with one thread of
torch; what is compared is CPU time, since others may use the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from numpy.typing import NDArray

from bench.memory.map_memory import train_a_little, write_image
from bench.report import ROOT, Claim, at_least, at_most, report

NORMS = ("none", "batch")
SHAPE = ("--network.poolings", "3", "--network.base", "8")


def ran(python: str, how: str, *arguments: object) -> dict[str, float]:
    """What bench/speed/mapping_run.py says."""
    ended = subprocess.run(
        [python, "-m", "bench.speed.mapping_run", how, *(str(part) for part in arguments)],
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    if ended.returncode:
        raise RuntimeError(f"{how} failed:\n{ended.stderr}")
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def logits(python: str, how: str, folder: Path, norm: str, own_px: int) -> NDArray[Any]:
    """Logits in float64, (C, H, W)."""
    out = folder / f"logits.{'tif' if how == 'ours' else 'npy'}"
    ran(python, how, folder / norm, folder / "image.tif", out, "logits", "float64", own_px)
    if how != "ours":
        found: NDArray[Any] = np.load(out)
        return found
    with rasterio.open(out) as file:
        values: NDArray[Any] = file.read()
    return values


def compared(
    pythons: dict[str, str], folder: Path, norm: str, own_px: int, times: int
) -> dict[str, Any]:
    """Fastest run, peak and largest difference from the untiled logits, of each way."""
    taken: dict[str, list[dict[str, float]]] = {how: [] for how in pythons}
    for _ in range(times):
        for how, python in pythons.items():
            out = folder / f"map.{'tif' if how == 'ours' else 'npy'}"
            work = folder / norm, folder / "image.tif", out, "classes", "float32", own_px
            taken[how].append(ran(python, how, *work))
    wanted = logits(sys.executable, "untiled", folder, norm, own_px)
    figures = {}
    for how, python in pythons.items():
        found = logits(python, how, folder, norm, own_px)
        figures[how] = {
            "seconds": min(one["seconds"] for one in taken[how]),
            "cpu_seconds": min(one["cpu_seconds"] for one in taken[how]),
            "peak_bytes": max(one["peak_bytes"] for one in taken[how]),
            "largest_difference": float(np.abs(found - wanted).max() / np.abs(wanted).max()),
            "classes_changed": float((found.argmax(0) != wanted.argmax(0)).mean()),
        }
        print(f"norm {norm}, {how}: {figures[how]}")
    return figures


def main() -> None:
    """Map by all ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--monai", metavar="PYTHON", help="default: no comparison, ours alone")
    parser.add_argument("--times", type=int, default=3, help="runs of each way (%(default)s)")
    given = parser.parse_args()
    side, own_px, times = (640, 160, 1) if given.quick else (2048, 512, given.times)
    pythons = {"ours": sys.executable}
    if given.monai:
        pythons |= {"constant": given.monai, "gaussian": given.monai}
    figures: dict[str, Any] = {"side": side, "own_px": own_px}
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_image(folder / "image.tif", side)
        for norm in NORMS if not given.quick else NORMS[1:]:
            scope = () if norm == "none" else ("--network.norm_scope", "tile")
            train_a_little(folder, norm, *SHAPE, "--network.norm", norm, *scope)
            found = figures[f"norm {norm}"] = compared(pythons, folder, norm, own_px, times)
            ours = found["ours"]
            claims.append(
                at_most(
                    f"norm {norm}: largest difference from the untiled logits, of the largest",
                    ours["largest_difference"],
                    1e-12,
                )
            )
            for how in list(pythons)[1:]:
                other = found[how]
                against = f"norm {norm}, against {how} blending:"
                claims += [
                    at_most(f"{against} CPU time", ours["cpu_seconds"] / other["cpu_seconds"], 1.0),
                    at_most(f"{against} peak", ours["peak_bytes"] / other["peak_bytes"], 1.0),
                    at_least(f"{against} its difference", other["largest_difference"], 1e-6),
                ]
    report("mapping", figures, claims)


if __name__ == "__main__":
    main()
