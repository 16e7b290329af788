"""What micro-batches cost when inputs of checkpoints and skips between partitions wait on the host.

The 109-layer U-Net of the paper in 6 partitions, micro-batches of 512², checkpointing always, SGD:
the fullest device's peak for 6, 12 and 24 micro-batches, with maps on the devices and on the host.
Peaks are those of a dry run, the pipeline itself on tensors without memory, which counts tensors to
the byte; beside them the formula that plans with. Then a smaller pipeline runs for real, with its
maps in a file: the same bits of gradients, the bytes that the dry run says, and its seconds beside
those of the same pipeline without a store, one after the other in this run.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from dry_run import dry_run, measured_run
from torch import Tensor

from bench.report import Claim, Found, at_least, at_most
from bench.steps import in_turns
from tilenet.geometry.unet import PRESETS, UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.model.origin import Origin
from tilenet.parallel.pipeline.host_store import HostStore
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.swap.copies import HostCopies
from tilenet.parallel.swap.host_pool import FileSlabs
from tilenet.parallel.swap.statistics import SwapStatistics
from tilenet.planning.balance import least_bytes
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.partition import block_bytes, partition_bytes

MIB = 2**20
CPU = torch.device("cpu")
EVEN = (18, 18, 18, 18, 18, 19)


def peaks(counts: list[int]) -> list[dict[str, Any]]:
    """The table: balances that are planned for the least bytes, and the even one."""
    layers = unet_layers(PRESETS["small"])
    costs = layer_bytes(layers, 512, 512)
    rows = []
    for many in counts:
        planned = [
            least_bytes(block_bytes(costs, many, "always", "sgd", 6, stored), 6, few=1)[0]
            for stored in (False, True)
        ]
        for name, (plain, stored) in (("planned", planned), ("even", (EVEN, EVEN))):
            row: dict[str, Any] = {"balance": name, "micro_batches": many}
            for key, balance, waits in (("devices", plain, False), ("host", stored, True)):
                found = dry_run(
                    layers, (512, 512), balance, many, "always", optimizer="sgd", stored=waits
                )
                formula = partition_bytes(costs, balance, many, "always", "sgd", waits)
                row[key] = {
                    "layers": list(balance),
                    "dry_run_mib": round(max(found.partitions) / MIB, 1),
                    "formula_mib": round(max(part.total for part in formula) / MIB, 1),
                }
            rows.append(row)
    return rows


def real(size: int, repeats: int) -> dict[str, Any]:
    """A pipeline of 4 partitions and 8 micro-batches with maps in a file, and without."""
    layers = unet_layers(UNetOptions(poolings=3, base=8, dropout=0.1))
    cuts = [0, *(len(layers) * k // 4 for k in (1, 2, 3)), len(layers)]
    balance = [b - a for a, b in pairwise(cuts)]
    images = [torch.randn(1, 4, size, size) for _ in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        copies = HostCopies(FileSlabs(folder), SwapStatistics())
        stores = [HostStore(copies, CPU) for _ in balance]
        pipes = {
            name: Pipe(build_network(layers).train(), balance, [CPU] * 4, "always", stores=kept)
            for name, kept in (("devices", None), ("host", stores))
        }
        gradients: dict[str, list[Tensor]] = {}

        def step(name: str) -> None:
            network = pipes[name].network
            network.zero_grad()
            outputs = pipes[name](images, [Origin((number,)) for number in range(len(images))])
            sum(output.square().sum() for output in outputs).backward()  # type: ignore[union-attr]
            gradients[name] = [p.grad for p in network.parameters() if p.grad is not None]

        steps: dict[str, Callable[[], None]] = {name: partial(step, name) for name in pipes}
        seconds = in_turns(steps, repeats, lambda: None)
        moved = copies.statistics.out_bytes + copies.statistics.in_bytes
        waited = copies.statistics.wait_seconds
        measured = measured_run(layers, (size, size), balance, 8, "always", stores=stores)
        copies.close()
    plain = measured_run(layers, (size, size), balance, 8, "always")
    predicted = dry_run(layers, (size, size), balance, 8, "always", stored=True)
    return {
        "size_px": size,
        "same_bits": all(
            torch.equal(a, b) for a, b in zip(gradients["devices"], gradients["host"], strict=True)
        ),
        "seconds": seconds,
        "copied_gb_per_s": moved / waited / 1e9,
        "measured_mib": max(measured.partitions) / MIB,
        "predicted_mib": max(predicted.partitions) / MIB,
        "without_mib": max(plain.partitions) / MIB,
    }


def bench(quick: bool) -> Found:
    """Peaks, and a pipeline that runs."""
    rows = peaks([6, 24] if quick else [6, 12, 24])
    run = real(128 if quick else 512, 2 if quick else 5)
    planned = [row for row in rows if row["balance"] == "planned"]
    ratio = run["seconds"]["host"] / run["seconds"]["devices"]
    claims: list[Claim] = [
        at_most(
            "fullest of 6 devices with a store, MiB, 6 to 24 micro-batches, planned balance",
            max(row["host"]["dry_run_mib"] for row in planned),
            1000,
        ),
        at_most(
            "peak for 24 micro-batches over that for 6, with a store",
            planned[-1]["host"]["dry_run_mib"] / planned[0]["host"]["dry_run_mib"],
            1.15,
        ),
        at_least("gradients are the same bits", float(run["same_bits"]), 1),
        at_most(
            "measured peak over the dry run's", run["measured_mib"] / run["predicted_mib"], 1.0
        ),
        at_most(
            "formula over dry run, at most",
            max(
                row[key]["formula_mib"] / row[key]["dry_run_mib"]
                for row in rows
                for key in ("devices", "host")
            ),
            1.1,
        ),
        at_most("seconds with maps in a file over seconds without", ratio, 1.1),
    ]
    return {"peaks": rows, "real": run}, claims
