"""Seconds of training per megapixel, by precision and memory format."""

import statistics
import time

import torch

from bench.gpu.gpu_memory import one_step
from bench.gpu.gpu_part import Asked, Figures, Found, wait
from tilenet.geometry.unet import PRESETS, UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.planning.swap.groups import group_sizes

__all__ = ["speed"]

PRECISIONS = ("float32", "tf32", "bfloat16", "float16")


def speed(asked: Asked) -> Found:
    """Each precision, contiguous and with channels last."""
    options = PRESETS["small"] if asked.cuda else _tiny()
    size, repeats = (1024, 4 if asked.quick else 10) if asked.cuda else (32, 1)
    rows: list[Figures] = []
    for channels_last in (False, True):
        for precision in PRECISIONS:
            if (rows and asked.late) or not asked.computes(precision):
                continue
            seconds = _seconds(asked, options, size, repeats, precision, channels_last)
            rows.append(
                {
                    "precision": precision,
                    "channels_last": channels_last,
                    "s_per_mpx": seconds,
                    "over_float32": seconds / (rows[0]["s_per_mpx"] if rows else seconds),
                }
            )
            print(rows[-1], flush=True)
    return {"size_px": size, "rows": rows}, []


def _tiny() -> UNetOptions:
    return UNetOptions(1, 1, 4, norm="instance")


def _seconds(
    asked: Asked,
    options: UNetOptions,
    size: int,
    repeats: int,
    precision: str,
    channels_last: bool,
) -> float:
    """Median seconds of a whole step on one tile, per megapixel."""
    layers = unet_layers(options)
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        kept = torch.channels_last if channels_last else torch.contiguous_format
        network = build_network(layers, device=asked.device).train()
        network.to(memory_format=kept)  # type: ignore[call-overload]
        pipe = Pipe(
            network,
            [len(layers)],
            [asked.device],
            precision="float32" if precision == "tf32" else precision,
            inline=True,
            groups=[group_sizes(layers)],
        )
        optimizer = torch.optim.SGD(network.parameters(), 0.0)
        image = torch.randn(1, options.bands, size, size, device=asked.device)
        images = [image.contiguous(memory_format=kept)]
        took = []
        for _ in range(repeats + 2):
            wait(asked.device)
            began = time.perf_counter()
            one_step(pipe, images, optimizer)
            took.append(time.perf_counter() - began)
            optimizer.zero_grad()
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
    return statistics.median(took[2:]) / (size**2 / 1e6)
