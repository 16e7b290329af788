"""Predicted against measured peak memory of training steps on a GPU."""

import gc
import time
from typing import Any

import torch

from bench.gpu.gpu_part import Asked, Figures, Found, wait
from bench.report import at_most
from tilenet.geometry.unet import PRESETS, UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.model.skips import Origin
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.planning.balance import likely_balance
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.live import LiveBytes
from tilenet.planning.memory.partition import partition_bytes

__all__ = ["memory", "one_step"]

CASES = [  # tile, partitions, micro-batches, checkpointing, precision
    (512, 1, 1, "never", "float32"),
    (1024, 1, 1, "never", "float32"),
    (1024, 1, 1, "never", "bfloat16"),
    (512, 1, 4, "always", "float32"),
    (512, 3, 4, "always", "float32"),
    (512, 3, 4, "except_last", "float16"),
    (512, 3, 4, "never", "float32"),
    (1024, 6, 6, "always", "bfloat16"),
]
TINY = [(64, 1, 1, "never", "float32"), (64, 2, 2, "always", "float32")]


def memory(asked: Asked) -> Found:
    """All cases; the first one calibrates, since cuDNN's workspace is no tensor."""
    options = PRESETS["small"] if asked.cuda else UNetOptions(poolings=2, base=8, norm="instance")
    cases = (CASES[:4] if asked.quick else CASES) if asked.cuda else TINY
    cases = [case for case in cases if asked.computes(case[4])]
    rows: list[Figures] = []
    for case in cases:
        if rows and asked.late:
            break
        row = _measured(options, case, asked.device)
        keys = ("tile_px", "partitions", "micro_batches", "checkpointing", "precision")
        rows.append({**dict(zip(keys, case, strict=True)), **row})
    ratios = [row["ratio"] for row in rows]
    worst = max(abs(ratio / ratios[0] - 1) for ratio in ratios)
    figures = {"left_out": len(cases) - len(rows), "rows": rows}
    claims = [at_most("error of predicted memory, calibrated once", worst, 0.05)]
    return figures, claims if asked.cuda else []


def one_step(pipe: Pipe, images: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Forward, backward and update, done when this returns."""
    outputs = pipe(images, [Origin((number,)) for number in range(len(images))])
    total = sum(output.float().square().sum(dtype=torch.float64) for output in outputs)
    del outputs
    total.backward()  # type: ignore[union-attr]
    optimizer.step()
    wait(images[0].device)


def _measured(
    options: UNetOptions, case: tuple[int, int, int, Any, str], device: torch.device
) -> Figures:
    """Predicted and measured bytes of a step; all partitions lie on one device, so they add up."""
    size, partitions, micro_batches, checkpointing, precision = case
    cuda = device.type == "cuda"
    gc.collect()  # what the case before left in cycles
    before = torch.cuda.memory_allocated(device) if cuda else 0
    layers = unet_layers(options)
    balance = likely_balance(layers, (size, size), partitions)
    costs = layer_bytes(layers, size, size, precision)
    parts = partition_bytes(costs, balance, micro_batches, checkpointing, "adamw")
    network = build_network(layers).train()
    inline = partitions == 1 or not cuda
    devices = [device] * partitions
    pipe = Pipe(network, balance, devices, checkpointing, precision, inline=inline)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-5, foreach=False)
    shape = (1, options.bands, size, size)
    images = [torch.randn(shape, device=device) for _ in range(micro_batches)]
    for _ in range(2):
        one_step(pipe, images, optimizer)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        one_step(pipe, images, optimizer)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        states = [one for state in optimizer.state.values() for one in state.values()]
        parameters = list(network.parameters())
        with LiveBytes() as live:
            live.charge([*parameters, *(p.grad for p in parameters), *states, *images])
            one_step(pipe, images, optimizer)
        peak = live.peak
    predicted = sum(part.total for part in parts)
    began = time.perf_counter()
    one_step(pipe, images, optimizer)
    return {
        "predicted_bytes": predicted,
        "measured_bytes": peak,
        "ratio": peak / predicted,
        "step_s": time.perf_counter() - began,
    }
