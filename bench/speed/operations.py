"""How many torch operations does a step dispatch, and how often does it wait for the device?

The preset `small`, on one rank and one crop: operations of forward, loss, backward and optimizer
of `tilenet.train`'s step by what they are, views among them, and of the same layers with torch's
own norms, without dropout, in a loop of plain torch. On a device each costs about 5 µs however
small its map is. There norms of whole maps take torch's kernels; here these are counted on a CPU.
A wait is a number or a shape that the host asks of a tensor. What counts does not depend on widths,
so the network is narrow.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bench.report import Found, at_most
from bench.scenes import write_pair

WAITS = "_local_scalar_dense", "tolist", "nonzero", "index"  # for numbers, or for a shape


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket._qualified_op_name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def counted(work: Callable[[], object]) -> Counter[str]:
    """Operations that this thread dispatches, and calls of `tolist`, which on a CPU is none."""
    read = torch.Tensor.tolist

    def noted(self: torch.Tensor) -> Any:
        counting.found["tolist"] += 1
        return read(self)

    with Counting() as counting, patch.object(torch.Tensor, "tolist", noted):
        work()
    found: Counter[str] = counting.found
    return found


def of_a_run(folder: Path, crop_px: int) -> tuple[Counter[str], int]:
    """Those of the second step of a run, and bytes of pixels and labels that it is given."""
    from mpi4py import MPI

    from tilenet.library import whole_run
    from tilenet.training.config.keys import NetworkKeys, OptimizerKeys
    from tilenet.training.config.run_file import RunFile
    from tilenet.training.step import Step

    image, labels = write_pair(folder, (4, crop_px, crop_px), 3)
    run = RunFile(
        images=image, labels=labels, classes=3, output=str(folder / "run"), steps=2,
        network=NetworkKeys(preset="small", base=4), optimizer=OptimizerKeys("adamw"),
        checkpoint_every=10**6, precision="float32", device="cpu", prove=False,
    )  # fmt: skip
    steps: list[Counter[str]] = []
    given: list[int] = []
    take = Step.take

    def weighed(reads: Iterator[Any]) -> Iterator[Any]:
        for parts in reads:
            given.append(sum(part.image.nbytes + part.labels.nbytes for part in parts))
            yield parts

    def counts(self: Step, step: int, reads: Iterator[Any], *arguments: Any) -> Any:
        done: list[Any] = []
        steps.append(counted(lambda: done.append(take(self, step, weighed(reads), *arguments))))
        return done[0]

    with patch.object(Step, "take", counts), patch.object(whole_run, "try_report"):
        whole_run.train(run, overwrite=True, comm=MPI.COMM_SELF)
    return steps[-1], given[-1]


def of_plain_torch(crop_px: int) -> Counter[str]:
    """Those of a step of torch's own modules."""
    from tilenet.geometry.unet import PRESETS, unet_layers
    from tilenet.model.network import build_network

    layers = unet_layers(replace(PRESETS["small"], base=4, classes=3, dropout=0.0))
    network = build_network(layers, 1, torch.float32).train()
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    x, labels = torch.randn(1, 4, crop_px, crop_px), torch.randint(3, (1, crop_px, crop_px))

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(network(x), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step()
    return counted(step)


def bench(quick: bool) -> Found:
    """Count both."""
    from tilenet.parallel.exchange import norm

    crop_px = 64 if quick else 256
    with tempfile.TemporaryDirectory() as folder:
        ours, given = of_a_run(Path(folder), crop_px)
        with patch.object(norm, "kernels_pay", lambda device: True):
            on_device, _ = of_a_run(Path(folder), crop_px)
    plain = of_plain_torch(crop_px)
    figures = {
        "crop_px": crop_px, "bytes_per_pixel": given / crop_px**2,
        "on a device": dict(on_device.most_common()),
        "on a CPU": dict(ours.most_common()),
        "plain torch": dict(plain.most_common()),
    }  # fmt: skip
    return figures, [
        at_most("operations of a step on a device", on_device.total(), 700),
        at_most("operations of a step on a CPU", ours.total(), 1800),
        at_most("waits of a step of one mini-batch", sum(ours[name] for name in WAITS), 1),
        at_most("bytes of pixels and labels, of 16 of float32 pixels", given / crop_px**2, 17),
    ]
