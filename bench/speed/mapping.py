"""How does `tilenet predict` compare with sliding windows whose overlaps are blended?

--monai PYTHON names one with monai beside torch, rasterio and what else tilenet needs. The same
networks map the same image (2048², 4 bands of uint16; quick: 640²), without norm and with batch
norm: tilenet, which sweeps the image, or reads a halo around own windows, and writes a
cloud-optimised GeoTIFF, and MONAI's `sliding_window_inference` with windows as large as our own
ones, overlapping by a quarter, blended by constant and by Gaussian weights. In turns, each in a
process of its own with one thread of torch; what is compared is CPU time, since others may use the
machine.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.report import Claim, Found, alone, at_least, at_most
from bench.scenes import train_a_little, write_random
from tilenet.data.rasters.raster import Raster
from tilenet.model.inputs import standardise
from tilenet.model.network import build_network, load_weights
from tilenet.storage.checkpoints import find_checkpoint, load_json, load_tensors
from tilenet.storage.network_json import NetworkRecord

OVERLAP = 0.25  # of MONAI's windows, its default
NORMS = ("none", "batch")
OURS = ("sweep", "tiles")


def mapped(
    how: str, run: str, image: str, out: str, output: str, precision: str, own_px: int
) -> dict[str, float]:
    """One map by one way, in a process of its own: seconds without imports, and the peak memory.

    `sweep` and `tiles` are `tilenet predict` on one rank, which writes a GeoTIFF; `constant` and
    `gaussian` are MONAI's sliding windows over the same network on the image in memory; `untiled`
    is the network on the whole image at once. These write numpy's.
    """
    from tilenet.parallel.health.peak_memory import measure_peak_bytes

    if how in OURS:
        from tilenet.mapping.predict import predict
        from tilenet.mapping.prediction import Prediction
        from tilenet.parallel.ranks.comm import world

        world()  # starts MPI
    elif how != "untiled":
        windows(how, 1)  # imports
    began, cpu_began = time.perf_counter(), time.process_time()
    if how in OURS:
        choices: Any = {"output": output, "precision": precision}
        choices |= {"tile_px": own_px} if how == "tiles" else {}
        predict(Prediction(run, image, out, device="cpu", overwrite=True, **choices))
    else:
        np.save(out, whole(how, run, image, output, precision, own_px))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": measure_peak_bytes(())}


def whole(how: str, run: str, image: str, output: str, precision: str, own_px: int) -> Any:
    """Logits (C, H, W) or classes (H, W) of an image that is held in memory."""
    folder = find_checkpoint(Path(run))
    record = NetworkRecord.from_json(load_json(folder / "network.json"))
    dtype = getattr(torch, precision)
    network = build_network(record.layers, dtype=dtype)
    load_weights(network, load_tensors(folder / "weights.safetensors"), run)
    network.eval()
    with Raster(image) as raster, torch.inference_mode():
        pixels = raster.read(raster.whole)
        x = standardise(pixels.values, pixels.valid, record.mean, record.std, dtype)
        logits = windows(how, own_px)(x, network)[0]
    found: NDArray[Any] = logits.numpy() if output == "logits" else logits.argmax(0).byte().numpy()
    return found


def windows(how: str, own_px: int) -> Callable[[Tensor, torch.nn.Module], Tensor]:
    """What runs a network over an image."""
    if how == "untiled":
        return lambda x, network: network(x)
    from monai.inferers import sliding_window_inference

    def slide(x: Tensor, network: torch.nn.Module) -> Tensor:
        found: Tensor = sliding_window_inference(x, own_px, 1, network, OVERLAP, mode=how)
        return found

    return slide


def logits(python: str, how: str, folder: Path, norm: str, own_px: int) -> NDArray[Any]:
    """Logits in float64, (C, H, W)."""
    out = folder / f"logits.{'tif' if how in OURS else 'npy'}"
    work = folder / norm, folder / "image.tif", out, "logits", "float64", own_px
    alone(mapped, how, *work, python=python)
    if how not in OURS:
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
            out = folder / f"map.{'tif' if how in OURS else 'npy'}"
            work = folder / norm, folder / "image.tif", out, "classes", "float32", own_px
            taken[how].append(alone(mapped, how, *work, python=python))
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
    return figures


def bench(quick: bool, monai: str = "", times: int = 3) -> Found:
    """Map by all ways and compare."""
    side, own_px, times = (1152, 160, 1) if quick else (2048, 512, times)
    pythons = dict.fromkeys(OURS, sys.executable)
    if monai:
        pythons |= {"constant": monai, "gaussian": monai}
    figures: dict[str, Any] = {"side": side, "own_px": own_px}
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random(folder / "image.tif", (4, side, side))
        for norm in NORMS if not quick else NORMS[1:]:
            shape = {"poolings": 3, "base": 8, "norm": norm}
            train_a_little(folder, norm, shape | ({} if norm == "none" else {"norm_scope": "tile"}))
            found = figures[f"norm {norm}"] = compared(pythons, folder, norm, own_px, times)
            claims += claims_of(norm, found, list(pythons)[len(OURS) :])
    return figures, claims


def claims_of(norm: str, found: dict[str, Any], others: list[str]) -> list[Claim]:
    """What our maps should reach."""
    sweep, tiles = (found[how] for how in OURS)
    claims = [
        at_most(
            f"norm {norm}: {how}: largest difference from the untiled logits, of the largest",
            found[how]["largest_difference"],
            1e-12,
        )
        for how in OURS
    ]
    ratio = sweep["cpu_seconds"] / tiles["cpu_seconds"]
    claims.append(at_most(f"norm {norm}: CPU time of a sweep over tiles", ratio, 0.9))
    for how in others:
        other = found[how]
        against = f"norm {norm}, against {how} blending:"
        claims += [
            at_most(f"{against} CPU time", sweep["cpu_seconds"] / other["cpu_seconds"], 0.7),
            at_most(f"{against} peak", sweep["peak_bytes"] / other["peak_bytes"], 1.0),
            at_least(f"{against} its difference", other["largest_difference"], 1e-6),
        ]
    return claims
