"""Peak memory of training steps on a GPU against the predicted."""

import gc
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bench.gpu.gpu_part import Asked, Figures, wait
from bench.report import Claim, Found, at_most
from tilenet.choices import Checkpointing
from tilenet.geometry.unet import PRESETS, UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.model.origin import Origin
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.planning.balance import likely_balance
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.live import LiveBytes
from tilenet.planning.memory.partition import partition_bytes

__all__ = ["memory"]


@dataclass(frozen=True)
class Case:
    """A training step; all partitions lie on one device."""

    tile_px: int
    partitions: int
    micro_batches: int
    checkpointing: Checkpointing
    precision: str


CASES = (
    Case(512, 1, 1, "never", "float32"),
    Case(1024, 1, 1, "never", "float32"),
    Case(1024, 1, 1, "never", "bfloat16"),
    Case(512, 1, 4, "always", "float32"),
    Case(512, 3, 4, "always", "float32"),
    Case(512, 3, 4, "except_last", "float16"),
    Case(512, 3, 4, "never", "float32"),
    Case(1024, 6, 6, "always", "bfloat16"),
)
TINY = Case(64, 1, 1, "never", "float32"), Case(64, 2, 2, "always", "float32")


def memory(asked: Asked) -> Found:
    """All cases; the first one calibrates, since cuDNN's workspace is no tensor."""
    options = PRESETS["small"] if asked.cuda else UNetOptions(poolings=2, base=8, norm="instance")
    cases = [
        case
        for case in (CASES[: 4 if asked.quick else None] if asked.cuda else TINY)
        if asked.computes(case.precision)
    ]
    rows: list[Figures] = []
    for case in cases:
        if rows and asked.late:
            break
        predicted, measured = _bytes(options, case, asked.device)
        row = {"predicted_bytes": predicted, "measured_bytes": measured}
        rows.append({**asdict(case), **row, "ratio": measured / predicted})
    figures = {"left_out": len(cases) - len(rows), "rows": rows}
    return figures, claims_of(rows) if asked.cuda else []


def claims_of(rows: list[Figures]) -> list[Claim]:
    """Of one partition both ways; of several on one device, whose peaks do not meet, upwards."""
    calibrated = [(row["partitions"] == 1, row["ratio"] / rows[0]["ratio"]) for row in rows]
    claims = [
        at_most(
            "error of predicted memory, calibrated once, one partition",
            max(abs(ratio - 1) for alone, ratio in calibrated if alone),
            0.05,
        )
    ]
    several = [ratio for alone, ratio in calibrated if not alone]
    if several:
        what = "memory over predicted, calibrated once, several partitions on one device"
        claims.append(at_most(what, max(several), 1.05))
    return claims


def _step(pipe: Pipe, images: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Forward, backward and update, done when this returns."""
    outputs = pipe(images, [Origin((number,)) for number in range(len(images))])
    total = sum(output.float().square().sum(dtype=torch.float64) for output in outputs)
    del outputs
    total.backward()  # type: ignore[union-attr]
    optimizer.step()
    wait(images[0].device)


def _bytes(options: UNetOptions, case: Case, device: torch.device) -> tuple[int, int]:
    """Predicted and measured bytes of the third step; bytes of partitions add up."""
    cuda, size = device.type == "cuda", case.tile_px
    gc.collect()  # what the case before left in cycles
    before = torch.cuda.memory_allocated(device) if cuda else 0
    layers = unet_layers(options)
    balance = likely_balance(layers, (size, size), case.partitions)
    costs = layer_bytes(layers, size, size, case.precision)
    parts = partition_bytes(costs, balance, case.micro_batches, case.checkpointing, "adamw")
    network = build_network(layers).train()
    pipe = Pipe(
        network, balance, [device] * case.partitions, case.checkpointing, case.precision,
        inline=case.partitions == 1 or not cuda,
    )  # fmt: skip
    parameters = list(network.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, 1e-5, fused=True)
    shape = (1, options.bands, size, size)
    images = [torch.randn(shape, device=device) for _ in range(case.micro_batches)]
    for _ in range(2):
        _step(pipe, images, optimizer)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        _step(pipe, images, optimizer)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        states = [one for state in optimizer.state.values() for one in state.values()]
        with LiveBytes() as live:
            live.charge([*parameters, *(p.grad for p in parameters), *states, *images])
            _step(pipe, images, optimizer)
        peak = live.peak
    return sum(part.total for part in parts), peak
