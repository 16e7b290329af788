"""What a GPU says of the predictions: memory of training steps, seconds of layers, precisions.

    python bench/gpu.py [--quick]

On one GPU, named several times where there are partitions: the peak that torch's allocator saw
during the third step of training against `planning.memory`, as it is and calibrated by the first
case (cuDNN's workspace is no tensor); the seconds of a tile in float32, TF32, bfloat16 and
float16; and measured seconds of the layers against the roofline of the machine that is named by
--machine, where its facts are known. Without a GPU it says so and measures nothing.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from report import Claim, at_most, report

from tilenet.geometry.networks import PRESETS, UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.model.skips import Origin
from tilenet.parallel.measure import measure_layers
from tilenet.parallel.pipeline import Pipe
from tilenet.planning.balance import likely_balance
from tilenet.planning.layer_bytes import layer_bytes
from tilenet.planning.machines import machine
from tilenet.planning.memory import partition_bytes
from tilenet.planning.roofline import roofline

GPU = torch.device("cuda", 0)
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


def one_step(pipe: Pipe, images: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    outputs = pipe(images, [Origin((number,)) for number in range(len(images))])
    total = sum(output.float().square().sum(dtype=torch.float64) for output in outputs)
    del outputs
    total.backward()  # type: ignore[union-attr]
    optimizer.step()
    torch.cuda.synchronize(GPU)


def memory(options: UNetOptions, case: tuple[int, int, int, Any, str]) -> dict[str, Any]:
    """Predicted and measured bytes of a step; all partitions lie on one GPU, so they add up."""
    size, partitions, micro_batches, checkpointing, precision = case
    layers = unet_layers(options)
    balance = likely_balance(layers, (size, size), partitions)
    costs = layer_bytes(layers, size, size, precision)
    parts = partition_bytes(costs, balance, micro_batches, checkpointing, "adamw")
    network = build_network(layers).train()
    devices = [GPU] * partitions
    pipe = Pipe(network, balance, devices, checkpointing, precision, inline=partitions == 1)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-5, foreach=False)
    images = [torch.randn(1, options.bands, size, size, device=GPU) for _ in range(micro_batches)]
    peaks = []
    for _ in range(3):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(GPU)
        one_step(pipe, images, optimizer)
        peaks.append(torch.cuda.max_memory_allocated(GPU))
    predicted = sum(part.total for part in parts)
    began = time.perf_counter()
    one_step(pipe, images, optimizer)
    return {
        "predicted_bytes": predicted,
        "measured_bytes": peaks[2],
        "ratio": peaks[2] / predicted,
        "step_s": time.perf_counter() - began,
    }


def precisions(options: UNetOptions, size: int, repeats: int) -> dict[str, float]:
    """Median seconds of a tile, forward and backward."""
    layers = unet_layers(options)
    seconds = {}
    for name in ("float32", "tf32", "bfloat16", "float16"):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "tf32"
        network = build_network(layers, device=GPU).train()
        precision = "float32" if name == "tf32" else name
        pipe = Pipe(network, [len(layers)], [GPU], precision=precision, inline=True)
        optimizer = torch.optim.SGD(network.parameters(), 0.0)
        images = [torch.randn(1, options.bands, size, size, device=GPU)]
        took = []
        for _ in range(repeats + 2):
            began = time.perf_counter()
            one_step(pipe, images, optimizer)
            took.append(time.perf_counter() - began)
        seconds[name] = statistics.median(took[2:])
    return seconds


def layers_against_roofline(options: UNetOptions, size: int, name: str) -> dict[str, float]:
    """Measured and predicted seconds of all layers, by kind."""
    layers = unet_layers(options)
    network = build_network(layers, device=GPU).train()
    image = torch.randn(1, options.bands, size, size, device=GPU)
    measured = measure_layers(network, image, "float32")
    predicted = roofline(layers, size, size, "float32", machine(name))
    figures: dict[str, float] = {}
    for layer, one, other in zip(layers, measured, predicted, strict=True):
        for key, value in (("measured", one), ("predicted", other)):
            kind = f"{layer.kind} {key} s"
            figures[kind] = figures.get(kind, 0.0) + value.forward_s + value.backward_s
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--machine", default="perlmutter", help="whose roofline to compare with")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        report("gpu", {"device": "none: torch sees no GPU, nothing was measured"}, [])
        return
    options = PRESETS["small"]
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(GPU)}
    cases = CASES[:4] if given.quick else CASES
    for case in cases:
        name = "{} px, {} partitions, {} micro-batches, {}, {}".format(*case)
        figures[name] = memory(options, case)
        print(name, figures[name])
    figures["seconds of a 1024² tile"] = precisions(options, 1024, 3 if given.quick else 10)
    figures["layers of a 1024² tile"] = layers_against_roofline(options, 1024, given.machine)
    ratios = [one["ratio"] for one in figures.values() if "ratio" in one]
    worst = max(abs(ratio / ratios[0] - 1) for ratio in ratios)
    claims: list[Claim] = [at_most("error of predicted memory, calibrated once", worst, 0.05)]
    report("gpu", figures, claims)


if __name__ == "__main__":
    main()
