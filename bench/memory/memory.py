"""How well are the bytes of a training step predicted?

Networks, tiles, partitions, micro-batches, checkpointing and precisions, on the CPU. Peaks of one
step: predicted by a dry run on fake tensors; counted on real tensors; and that of the CPU's
allocator (torch.profiler's memory events), which alone sees what convolutions take inside: against
a dry run that counts what each of them took when it was run once by itself. The partition formula
is compared with the dry run at the bottleneck.
"""

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

import torch
from dry_run import dry_run, measured_run
from scratch import Scratch, allocated_peak

from bench.report import Claim, Found, at_least, at_most
from tilenet.geometry.unet import PRESETS, UNetOptions, unet_layers
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.partition import partition_bytes

Case = dict[str, Any]

NETWORKS: dict[str, UNetOptions] = {
    "instance": UNetOptions(poolings=3, base=16, norm="instance", dropout=0.1, classes=2),
    "batch": UNetOptions(poolings=2, base=16, norm="batch", upsampling="bilinear", classes=5),
    "group": UNetOptions(poolings=3, base=8, norm="group", upsampling="transposed", classes=3),
    "plain": UNetOptions(poolings=2, base=16, convolutions=3, bands=3, classes=2),
    "valid": UNetOptions(poolings=2, base=16, padding="valid", norm="batch", classes=2),
}
# network, tile, balance as shares, micro-batches, checkpointing, precision
CASES: list[tuple[str, tuple[int, int], int, int, str, str]] = [
    ("instance", (256, 288), 1, 1, "never", "float32"),
    ("instance", (256, 288), 3, 4, "always", "float32"),
    ("instance", (192, 208), 4, 3, "except_last", "bfloat16"),
    ("batch", (250, 261), 1, 1, "never", "float32"),
    ("batch", (250, 261), 2, 4, "never", "float32"),
    ("batch", (224, 240), 4, 6, "always", "float32"),
    ("batch", (192, 208), 2, 2, "always", "bfloat16"),
    ("group", (317, 299), 1, 2, "always", "float32"),
    ("group", (224, 256), 3, 5, "except_last", "float32"),
    ("group", (160, 176), 2, 3, "never", "float64"),
    ("plain", (241, 203), 1, 3, "never", "float32"),
    ("plain", (241, 203), 5, 6, "always", "float32"),
    ("plain", (160, 192), 2, 2, "except_last", "float64"),
    ("valid", (260, 292), 1, 1, "never", "float32"),
    ("valid", (260, 292), 2, 4, "always", "float32"),
]
LARGER = 2  # the full run's tiles are larger by this


def as_case(entry: tuple[str, tuple[int, int], int, int, str, str], quick: bool) -> Case:
    """Arguments of `dry_run`, plain."""
    name, tile, partitions, many, mode, precision = entry
    options = NETWORKS[name]
    if not quick:
        # Keeps valid networks' sizes legal: their rest by 4 stays.
        tile = (tile[0] * LARGER + 4 - tile[0] % 4, tile[1] * LARGER + 4 - tile[1] % 4)
        if options.padding == "valid":
            tile = (tile[0] // 4 * 4, tile[1] // 4 * 4)
    count = len(unet_layers(options))
    balance = [count * (j + 1) // partitions - count * j // partitions for j in range(partitions)]
    return {
        "network": name,
        "tile": tile,
        "balance": balance,
        "micro_batches": many,
        "checkpointing": mode,
        "precision": precision,
    }


def measure(case: Case) -> dict[str, Any]:
    """All peaks of a case."""
    torch.set_num_threads(1)
    arguments = {**case, "layers": unet_layers(NETWORKS[case["network"]])}
    del arguments["network"]
    began = time.perf_counter()
    predicted = dry_run(**arguments)
    seconds = time.perf_counter() - began
    measured = measured_run(**arguments)
    tensors = dry_run(**arguments, one_device=True)
    together = dry_run(**arguments, one_device=True, scratch=Scratch(torch.device("cpu")))
    height, width = case["tile"]
    costs = layer_bytes(arguments["layers"], height, width, case["precision"])
    parts = partition_bytes(costs, case["balance"], case["micro_batches"], case["checkpointing"])
    most = allocated_peak(
        lambda: measured_run(**arguments, one_device=True, count=False), torch.device("cpu")
    )
    return {
        "predicted": asdict(predicted),
        "measured": asdict(measured),
        "formula": [part.total for part in parts],
        "tensors_one_device": tensors.total,
        "predicted_one_device": together.total,
        "allocator": most,
        "dry_run_seconds": seconds,
    }


def bench(quick: bool) -> Found:
    """Run all cases."""
    cases = [as_case(entry, quick) for entry in CASES]
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        results = list(processes.map(measure, cases))
    # Real batch norm keeps its statistics in float32 there, fake batch norm in bfloat16.
    mixed = next(n for n, one in enumerate(CASES) if (one[0], one[-1]) == ("batch", "bfloat16"))
    predicted, measured = (results[mixed][key]["total"] for key in ("predicted", "measured"))
    others = results[:mixed] + results[mixed + 1 :]
    equal = sum(one["predicted"] == one["measured"] for one in others)
    formulas, errors = [], {"float32": 0.0, "other precisions": 0.0}
    for case, found in zip(cases, results, strict=True):
        formulas.append(max(found["formula"]) / max(found["predicted"]["partitions"]))
        found["formula_over_dry_run"] = formulas[-1]
        found["predicted_over_allocator"] = found["predicted_one_device"] / found["allocator"]
        kind = "float32" if case["precision"] == "float32" else "other precisions"
        errors[kind] = max(errors[kind], abs(found["predicted_over_allocator"] - 1))
    figures: dict[str, Any] = {
        " ".join(map(str, entry)): found for entry, found in zip(CASES, results, strict=True)
    }
    large = unet_layers(PRESETS["large"])
    layer_bytes(large, 512, 512)
    began = time.process_time()
    layer_bytes(large, 1434, 1434)
    seconds = time.process_time() - began
    figures["large_layer_bytes_seconds"] = seconds
    exact = len(CASES) - 1
    claims: list[Claim] = [
        at_least(f"cases of {exact} whose tensors are predicted to the byte", equal, exact),
        at_most("error of the other one, batch norm under autocast",
                abs(predicted / measured - 1), 1e-3),
        # With scratch inside of convolutions: their maps in the kernel's own layout; with float64
        # the CPU's kernels lay out all windows, 9 values an element.
        *(at_most(f"worst error against the allocator's peak, {kind}", error, 0.1)
          for kind, error in errors.items()),
        at_least("formula over dry run at the bottleneck, lowest", min(formulas), 0.98),
        at_most("formula over dry run at the bottleneck, highest", max(formulas), 1.15),
        at_most("seconds for the bytes of 149 layers", seconds, 1.0),
    ]  # fmt: skip
    return figures, claims
