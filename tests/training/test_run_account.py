"""What a run says of its time and memory, on any number of ranks, and that this costs nothing."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from left_by_runs import rows, stop_in
from mpi4py import MPI
from test_same_as_whole_image import run_file, scenes_of

from tilenet.errors import AgreedError
from tilenet.library.whole_run import train
from tilenet.parallel.exchange.halo import HaloChannel
from tilenet.parallel.health import peak_memory
from tilenet.parallel.health.exchange_clock import EXCHANGING, ExchangeClock
from tilenet.report import page as write
from tilenet.training.config.keys import NetworkKeys, OptimizerKeys, TileKeys
from tilenet.training.config.read import read_run_file
from tilenet.training.config.run_file import RunFile
from tilenet.training.folder import record
from tilenet.training.folder.log import RunLog

INSTANCE = NetworkKeys(poolings=2, base=4, norm="instance")
PLAIN = NetworkKeys(poolings=2, base=4)
PARTS = ["read_seconds", "exchange_seconds", "reduce_seconds", "swap_wait_seconds"]


def a_run(comm: MPI.Intracomm, path: Path, network: NetworkKeys, **more: Any) -> RunFile:
    return run_file(path, scenes_of(path, [(97, 131)], comm), network, **more)


def timings(run: RunFile) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(run.output) / "timings.json").read_text())
    return found


def spoilt(clock: ExchangeClock) -> None:
    """Have it hold what must not be counted."""
    with clock:
        time.sleep(0.05)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("network", "halo_mode"), [(INSTANCE, "overlap"), (PLAIN, "exchange")])
def test_each_rank_accounts_for_its_steps(
    comm: MPI.Intracomm, shared_path: Path, network: NetworkKeys, halo_mode: str
) -> None:
    run = a_run(comm, shared_path, network, halo_mode=halo_mode)
    spoilt(EXCHANGING)  # as by a validation between steps
    assert train(run, comm=comm) == 0
    found, steps = timings(run), rows(run)
    assert (found["first_step"], found["last_step"]) == (1, 3)
    assert len(found["ranks"]) == comm.size
    names = {"seconds", "compute_seconds", "peak_bytes", *PARTS}
    for entry in (*found["ranks"], found["least"], found["mean"], found["most"]):
        assert set(entry) == names
    for name in names:
        values = [rank[name] for rank in found["ranks"]]
        assert found["least"][name] == min(values)
        assert found["most"][name] == max(values)
        assert found["mean"][name] == pytest.approx(np.mean(values), rel=1e-14)
    for rank in found["ranks"]:
        parts = sum(rank[name] for name in PARTS)
        assert rank["compute_seconds"] == pytest.approx(rank["seconds"] - parts, rel=1e-9)
        assert rank["compute_seconds"] > 0
        # Sums of norms go over all ranks of an image, halos to neighbours.
        assert (rank["exchange_seconds"] > 0) == (comm.size > 1)
    first = found["ranks"][0]
    for name in ("seconds", *PARTS):
        assert first[name] == pytest.approx(sum(float(row[name]) for row in steps), rel=1e-12)
    peaks = [int(float(row["peak_bytes"])) for row in steps]
    assert peaks == sorted(peaks)
    assert peaks[-1] == first["peak_bytes"] > 50 << 20


@pytest.mark.ranks(1)
def test_the_peak_never_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(peak_memory, "STATUS", status)
    monkeypatch.setattr(peak_memory, "highest", [0])
    peaks = []
    for kilobytes in (432856, 432852, 432860):
        status.write_text(f"Name:\tx\nVmHWM:\t {kilobytes} kB\n")
        peaks.append(peak_memory.measure_peak_bytes([torch.device("cpu")]) // 1024)
    assert peaks == [432856, 432856, 432860]


@pytest.mark.ranks(2, 4)
def test_what_is_resumed_accounts_for_its_own_steps(comm: MPI.Intracomm, shared_path: Path) -> None:
    run = a_run(comm, shared_path, PLAIN)
    assert train(run, comm=comm) == 0
    longer = replace(run, steps=5)
    assert train(longer, resume=True, comm=comm) == 0
    assert (timings(run)["first_step"], timings(run)["last_step"]) == (4, 5)
    kept = timings(run)
    assert train(longer, resume=True, comm=comm) == 0  # with nothing left to do
    assert timings(run) == kept
    again, _ = read_run_file(["-c", str(Path(run.output) / "run.yaml")])
    assert again == longer


@pytest.mark.ranks(2)
def test_what_waits_to_be_written_is_written_where_a_run_fails(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scalars wait in a thread of TensorBoard, which nobody waits for at the end of a process."""
    closed: list[Path] = []
    monkeypatch.setattr(RunLog, "close", lambda log: closed.append(log.folder))
    far = OptimizerKeys(name="sgd", lr=1e200)
    run = replace(a_run(comm, shared_path, PLAIN), optimizer=far)
    with pytest.raises(AgreedError, match="must stay finite"):
        train(run, comm=comm)
    assert closed == [Path(run.output)] * (comm.rank == 0)


@pytest.mark.ranks(2)
def test_waiting_for_a_halo_is_counted(comm: MPI.Intracomm) -> None:
    other, part = 1 - comm.rank, torch.full((5,), float(comm.rank))
    EXCHANGING.take()
    pending = HaloChannel(comm).start([], [(other, (5,))], part, 1) if comm.rank == 0 else None
    if pending is None:
        time.sleep(0.2)
        HaloChannel(comm).start([(other, part)], [], part, 1).wait()
    else:
        assert pending.wait()[0].tolist() == [1.0] * 5
        assert EXCHANGING.take() > 0.1


@pytest.mark.ranks(1)
def test_threads_that_exchange_at_once_are_counted_once() -> None:
    clock, inside = ExchangeClock(), threading.Barrier(4)

    def exchange() -> None:
        with clock:
            inside.wait()
            time.sleep(0.1)
            inside.wait()

    began = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(exchange)
    passed = time.perf_counter() - began
    assert 0.1 <= clock.take() <= passed
    assert clock.take() == 0


@pytest.mark.ranks(1, 2)
@pytest.mark.report
def test_a_run_ends_with_a_report(comm: MPI.Intracomm, shared_path: Path) -> None:
    run = a_run(comm, shared_path, PLAIN, tiles=TileKeys(2, 2))
    assert train(run, comm=comm) == 0
    # There for every rank, as soon as it returns.
    text = (Path(run.output) / "report.html").read_text()
    assert "labelled pixels are wrong" in text
    assert train(replace(run, steps=1), overwrite=True, comm=comm) == 0
    comm.Barrier()
    assert len(rows(run)) == 1


@pytest.mark.ranks(1, 2)
@pytest.mark.report
def test_a_report_that_fails_is_said_and_fails_nothing(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*given: object, **more: object) -> None:
        raise ZeroDivisionError("no\npage")

    monkeypatch.setattr(write, "page", fail)
    run = a_run(comm, shared_path, PLAIN)
    assert train(run, comm=comm) == 0
    said = capsys.readouterr().err
    assert ("no report was written (no page); tilenet report" in said) == (comm.rank == 0)
    assert not (Path(run.output) / "report.html").exists()
    assert len(rows(run)) == 3


@pytest.mark.ranks(1, 2)
@pytest.mark.report
def test_a_run_that_is_stopped_leaves_a_report_without_maps(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_in(monkeypatch, comm, 2)
    run = a_run(comm, shared_path, PLAIN)
    assert train(run, comm=comm) == 75
    assert timings(run)["last_step"] == 2
    text = (Path(run.output) / "report.html").read_text()
    assert "since the run was stopped" in text
    assert "labelled pixels are wrong" not in text


def test_a_checkout_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "tilenet":
            raise PackageNotFoundError(name)
        return f"of {name}"

    monkeypatch.setattr(record, "version", version)
    assert record.versions()["tilenet"] == "not installed"
    assert record.versions()["torch"] == "of torch"
