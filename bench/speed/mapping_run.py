"""One map of one image by one way, in a process of its own; bench/speed/mapping.py starts it.

    python -m bench.speed.mapping_run WAY RUN IMAGE OUT OUTPUT PRECISION OWN_PX

`ours` is `tilenet predict` on one rank; `constant` and `gaussian` are MONAI's sliding windows over
the same network on the image in memory; `untiled` is the network on the whole image at once. OUT is
a GeoTIFF for ours, else an array of numpy. Prints seconds without imports, of the clock and of the
CPU, and the peak memory.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilenet.data.rasters.raster import Raster
from tilenet.model.inputs import standardise
from tilenet.model.network import build_network, load_weights
from tilenet.parallel.health.progress import peak_bytes
from tilenet.storage.checkpoints import find_checkpoint, load_json, load_tensors
from tilenet.storage.network_json import NetworkRecord

OVERLAP = 0.25  # of MONAI's windows, its default


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


def main() -> None:
    """Make the map and print what it took."""
    how, run, image, out, output, precision, own_px = sys.argv[1:]
    if how == "ours":
        from tilenet.parallel.ranks.comm import world
        from tilenet.predict import Prediction, predict

        world()  # starts MPI
    elif how != "untiled":
        windows(how, 1)  # imports
    began, cpu_began = time.perf_counter(), time.process_time()
    if how == "ours":
        choices: Any = {"output": output, "precision": precision, "tile_px": int(own_px)}
        predict(Prediction(run, image, out, device="cpu", overwrite=True, **choices))
    else:
        np.save(out, whole(how, run, image, output, precision, int(own_px)))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    peak = peak_bytes(())
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
