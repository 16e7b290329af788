"""Train pipelines whose partitions lie on the CPU and a second device by turns, and compare.

A program: a process that has the second device keeps it. It prints the cases as it goes.
"""

import sys
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from second_device import add_second_device
from test_flow import feed
from test_pipeline import MODES, balance_of, images, made, options, piped, plain, term
from torch import Tensor

from tilenet.geometry.unet import UNetOptions
from tilenet.model.network import Network
from tilenet.parallel.pipeline.pipe import Pipe

CPU, SECOND = torch.device("cpu"), add_second_device()
NETWORKS = {
    "dropout": options(dropout=0.3),
    "instance": options(norm="instance", upsampling="transposed"),
    "group": options(norm="group", poolings=1),
}
Engine = Callable[[Pipe, list[Tensor]], None]


def by_gpipe(pipe: Pipe, batch: list[Tensor]) -> None:
    outputs, _ = piped(pipe, batch)
    assert {output.device for output in outputs} == {pipe.devices[-1]}


def in_flow(pipe: Pipe, batch: list[Tensor]) -> None:
    pipe.train_in_flow(feed(batch), term, 3)


def compare(engine: Engine, wished: UNetOptions, partitions: int, mode: Any, seed: int) -> None:
    """One case.

    Raises:
        AssertionError: A gradient is not that of the plain network, to 1e-12 of its largest.
    """
    batch = images(4)
    _, wanted = plain(made(wished), batch)
    network = made(wished)
    devices = [(CPU, SECOND)[(at + seed) % 2] for at in range(partitions)]
    threads = backward_threads(network)
    engine(Pipe(network, balance_of(len(network), partitions, seed), devices, mode), batch)
    places = {parameter.device.type for parameter in network.parameters()}
    assert places == {"cpu", "second"}, places
    assert not threads["cpu"] & threads["second"], "both devices go back in one thread"
    for name, parameter in network.named_parameters():
        if name in wanted:
            assert parameter.grad is not None, name
            off = (parameter.grad.cpu() - wanted[name]).abs().max()
            assert off <= 1e-12 * wanted[name].abs().max(), f"{name}: {float(off):.3g}"


def backward_threads(network: Network) -> dict[str, set[int]]:
    """The threads that will give each kind of device's weights their gradients."""
    threads: dict[str, set[int]] = {"cpu": set(), "second": set()}

    def note(parameter: Tensor) -> None:
        threads[parameter.device.type].add(threading.get_ident())

    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    return threads


if __name__ == "__main__":
    torch.set_num_threads(1)
    engines: dict[str, tuple[Engine, tuple[str, ...]]] = {
        "gpipe": (by_gpipe, MODES),
        "1f1b": (in_flow, ("never", "always")),
    }
    for name, (engine, modes) in engines.items():
        for seed, (mode, norm) in enumerate(product(modes, NETWORKS)):
            partitions = 2 + seed % 3
            print(f"{name}, {mode}, {norm}, {partitions} partitions", file=sys.stderr, flush=True)
            compare(engine, NETWORKS[norm], partitions, mode, seed)
