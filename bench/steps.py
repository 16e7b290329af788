"""Steps of `tilenet train` with the clock on them, for benches that compare whole steps."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

    from tilenet.training.config.run_file import RunFile

__all__ = ["Row", "in_turns", "small_run", "timed_steps"]

Row = dict[str, float]


def in_turns(
    steps: dict[str, Callable[[], None]], repeats: int, barrier: Callable[[], object],
    between: Callable[[], object] = lambda: None,
) -> dict[str, float]:  # fmt: skip
    """Median seconds of steps that ranks make in turns; the first turn does not count."""
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    for turn in range(repeats + 1):
        for way, step in steps.items():
            barrier()
            began = time.perf_counter()
            step()
            took = time.perf_counter() - began
            between()
            if turn:
                seconds[way].append(took)
    return {way: sorted(some)[len(some) // 2] for way, some in seconds.items()}


def small_run(images: list[str], output: str, steps: int, base: int = 16, **keys: Any) -> "RunFile":
    """A float32 run of a small U-Net on pairs of `scenes.write_pair`, which saves at its end."""
    from tilenet.training.config.keys import NetworkKeys, OptimizerKeys
    from tilenet.training.config.run_file import RunFile
    from tilenet.training.config.validation_keys import ValidationKeys

    return RunFile(
        images=tuple(images), labels=tuple(f"{one[:-4]}_labels.tif" for one in images),
        classes=3, output=output, batch_size=len(images), steps=steps,
        network=NetworkKeys(poolings=4, convolutions=2, base=base, norm=keys.pop("norm", "none")),
        optimizer=OptimizerKeys("sgd", 1e-3), validation=ValidationKeys(),
        checkpoint_every=10**6, precision="float32", device="cpu", hang_seconds=600, **keys,
    )  # fmt: skip


def timed_steps(
    run: "RunFile", comm: "MPI.Intracomm", before: Callable[[], object] = lambda: None
) -> list[Row]:
    """Train over these ranks, without a report; seconds of each step on this rank, and in what.

    Args:
        before: Called before each step.
    """
    import torch

    from tilenet.library import whole_run as account
    from tilenet.training.step import Step, StepResult

    account.try_report = lambda folder, maps: None  # type: ignore[attr-defined,misc]
    rows: list[Row] = []
    take = Step.take

    def timed(self: Step, *arguments: Any) -> StepResult:
        before()
        began, cpu_began = time.perf_counter(), time.process_time()
        done = take(self, *arguments)
        rows.append(
            {
                "seconds": time.perf_counter() - began,
                "cpu_seconds": time.process_time() - cpu_began,
                "read_seconds": done.read_seconds,
                "reduce_seconds": done.reduce_seconds,
                "exchange_seconds": done.exchange_seconds,
            }
        )
        return done

    Step.take = timed  # type: ignore[assignment,method-assign]
    torch.set_num_threads(1)
    account.train(run, overwrite=True, comm=comm)
    return rows
