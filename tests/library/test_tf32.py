"""TF32 is in force where a run asks for it, and off wherever else tilenet computes on GPUs.

Its flags are the process's: a CPU shows as well who sets them, and that they are set back.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from scenes import KEYS, Net

import tilenet
from tilenet.__main__ import main
from tilenet.errors import TilenetError
from tilenet.geometry.unet import PRESETS, unet_layers
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.proof import no_trace
from tilenet.parallel.ranks import tf32
from tilenet.parallel.ranks.tf32 import has_tf32, say_where_no_tf32, tf32_if_asked
from tilenet.planning.machines.read import machine
from tilenet.planning.time.roofline import roofline

Flags = tuple[bool, bool]  # whether convolutions and products may use TF32


def flags() -> Flags:
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[Flags]]]:
    """Flags of all forward and backward passes of pipes, in a process that likes to round."""
    found: dict[str, set[Flags]] = {"forward": set(), "backward": set()}
    call = Pipe.__call__

    def watched(self: Pipe, *args: Any) -> list[torch.Tensor]:
        found["forward"].add(flags())
        outputs = call(self, *args)
        for output in outputs:
            if output.requires_grad:
                output.register_hook(lambda _: found["backward"].add(flags()))
        return outputs

    monkeypatch.setattr(Pipe, "__call__", watched)
    with tf32_if_asked("tf32"):
        yield found


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_a_run_and_its_maps_use_it_where_asked(
    scene: Path, seen: dict[str, set[Flags]], precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (precision == "tf32",) * 2
    keys = {**KEYS, "precision": precision, "steps": 1, "prove": False}
    during = []
    run = tilenet.train(Net(), **keys, output="run", on_validation=lambda _: during.append(flags()))
    assert during == [asked]
    assert (seen["forward"], seen["backward"]) == ({asked}, {asked})
    assert flags() == (True, True)  # as before
    line = "precision: tf32 is float32 on devices without TF32 (rank 0: cpu)"
    assert (line in capsys.readouterr().err) == asked[0]
    for make in (
        lambda: tilenet.predict(run, "i.tif", prove=False),
        lambda: main(["report", "run"]),
    ):
        seen["forward"].clear()
        make()
        assert seen["forward"] == {asked}
    seen["forward"].clear()
    tilenet.predict(run, "i.tif", prove=False, precision="float32")
    assert seen["forward"] == {(False, False)}
    assert flags() == (True, True)


def test_a_proof_is_strict_within_a_run_of_tf32() -> None:
    with tf32_if_asked("tf32"):
        with no_trace([torch.device("cpu")]):
            assert flags() == (False, False)
        assert flags() == (True, True)


def test_a_loop_of_ones_own_is_strict_and_its_script_as_it_was(
    scene: Path, seen: dict[str, set[Flags]]
) -> None:
    job = tilenet.Job()
    local = job.split(Net())
    for step in job.steps("i.tif", "l.tif", steps=1, prove=False):
        for tile in step:
            logits = local(tile.image)[tile.own]
            assert flags() == (True, True)
            loss = F.cross_entropy(logits, tile.labels, ignore_index=255, reduction="sum")
            step.add(loss, (tile.labels != 255).sum())
        step.apply(torch.optim.SGD(local.parameters(), 0.1))
    job.predict("i.tif")
    assert (seen["forward"], seen["backward"]) == ({(False, False)}, {(False, False)})
    assert flags() == (True, True)


def test_what_raises_leaves_the_flags_as_they_were() -> None:
    before = flags()
    with suppress(ZeroDivisionError), tf32_if_asked("tf32"):
        raise ZeroDivisionError
    assert flags() == before


def test_flags_that_were_set_by_their_newer_names_are_set_by_them() -> None:
    """torch does not tell the older ones then."""
    convolutions, products = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    owners: Any = convolutions, torch.backends.cudnn.rnn, products
    before = [one.fp32_precision for one in owners]
    try:
        for one in owners:
            one.fp32_precision = "ieee"
        with tf32_if_asked("tf32"):
            assert [one.fp32_precision for one in owners] == ["tf32"] * 3
            with tf32_if_asked("float16"):
                assert [one.fp32_precision for one in owners] == ["ieee"] * 3
        assert [one.fp32_precision for one in owners] == ["ieee"] * 3
    finally:
        for one, value in zip(owners, before, strict=True):
            one.fp32_precision = value
    assert flags() == (True, False)  # torch's own


@pytest.mark.parametrize(
    ("capability", "hip", "there"),
    [((8, 0), None, True), ((9, 0), None, True), ((7, 5), None, False), ((9, 0), "6.2", False)],
)
def test_devices_of_compute_capability_8_have_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, there: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert has_tf32(torch.device("cuda", 1)) == there
    assert not has_tf32(torch.device("cpu"))


def test_rank_0_names_the_first_rank_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tf32, "has_tf32", lambda device: device.index == 0)
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    say_where_no_tf32("tf32", devices[:1], MPI.COMM_SELF)
    say_where_no_tf32("float32", devices, MPI.COMM_SELF)
    assert not capsys.readouterr().err
    say_where_no_tf32("tf32", devices, MPI.COMM_SELF)
    assert "(rank 0: cuda:1)" in capsys.readouterr().err


def test_a_profile_of_it_needs_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "profile --preset small --tile 64x64 --device cpu --precision tf32"
    assert main(asked.split()) == 1
    assert (
        "compute capability 8 and later (device: cpu); measure float32" in capsys.readouterr().err
    )


def test_a_plan_reckons_with_its_peak_or_names_it() -> None:
    layers = unet_layers(PRESETS["small"])

    def seconds(precision: str, where: str) -> float:
        times = roofline(layers, 512, 512, precision, machine(where))
        return sum(one.forward_s + one.backward_s for one in times)

    float32, tf32, float16 = (seconds(one, "perlmutter") for one in ("float32", "tf32", "float16"))
    assert float16 < tf32 < float32 / 2
    with pytest.raises(TilenetError, match="machine summit has no peak for precision tf32"):
        seconds("tf32", "summit")
