"""Train and map on the second device alone, over the ranks that this starts on; compare with CPUs.

A program: a process that has the second device keeps it. It prints the cases as it goes. Code that
asks for "cuda" where it means a device that is not the CPU fails here, or leaves something unused.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from left_by_runs import rows
from mpi4py import MPI
from second_device import PEAK_BYTES, USED, add_second_device
from test_same_as_whole_image import NETWORKS, check_same, outcome_of, run_file
from whole_image import random_scene

from tilenet.library import whole_run
from tilenet.mapping import predict
from tilenet.parallel.proof import no_trace
from tilenet.parallel.ranks import layout
from tilenet.training.config.keys import OptimizerKeys, TileKeys
from tilenet.training.config.run_file import RunFile

COMM = MPI.COMM_WORLD
CASES: dict[str, dict[str, Any]] = {
    "overlap": {"optimizer": OptimizerKeys(name="adamw", lr=0.01), "tiles": TileKeys(2, 3)},
    "exchange": {"halo_mode": "exchange"},
    "sweep": {"halo_mode": "sweep"},
}


@contextmanager
def on_the_second() -> Iterator[None]:
    """Ranks take it, whatever they are asked for."""

    def choose(*_: Any) -> tuple[torch.device, ...]:
        torch.get_device_module(second).set_device(second)
        return (second,)

    patches = [patch.object(module, "choose_devices", choose) for module in (layout, predict)]
    with patches[0], patches[1]:
        yield


def compare(name: str, run: RunFile, image: Path, valid: Any) -> None:
    """One case.

    Raises:
        AssertionError: Losses, weights or logits are not those of CPUs.
    """
    wanted = outcome_of(replace(run, output=f"{run.output} of {name} on CPUs"), COMM, image, 40)
    USED.clear()
    other = replace(run, output=f"{run.output} of {name}", device="auto")
    with on_the_second():
        found = outcome_of(other, COMM, image, 40)
    check_same(COMM, found, wanted, valid)
    assert {row["peak_bytes"] for row in rows(other)} == {str(PEAK_BYTES)}
    with no_trace([second]):  # what a proof leaves no trace of
        pass
    uses = {"set_device", "mem_get_info", "pinned", "event", "stream", "empty_cache"}
    assert uses <= USED.keys(), USED


if __name__ == "__main__":
    torch.set_num_threads(1)
    second = add_second_device()
    folder = Path(sys.argv[1])
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(whole_run, "try_report", lambda folder, maps: None)
        scene = random_scene(folder, (61, 90), 1, write=COMM.rank == 0)
        COMM.Barrier()
        for name, keys in CASES.items():
            print(f"{name}, {COMM.size} ranks", file=sys.stderr, flush=True)
            run = run_file(folder, [scene], NETWORKS["same-bilinear"])
            compare(name, replace(run, **keys), scene.image, scene.valid)
