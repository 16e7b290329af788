"""Runs that swap: the same bits as runs that do not, whatever the ranks and the pipeline."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from left_by_runs import rows, same_tensors, weights
from mpi4py import MPI
from test_same_as_whole_image import NETWORKS, run_file, scenes_of
from whole_image import random_scene

from tilenet.errors import AgreedError, TilenetError
from tilenet.library.whole_run import train
from tilenet.planning.machines.read import machine
from tilenet.training.config.keys import MeshKeys, NetworkKeys, SwappingKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.setup import swap as run_swap

pytestmark = pytest.mark.ranks(1, 2)

ALL = SwappingKeys(min_mib=0)
Outcome = tuple[list[dict[str, str]], dict[str, Any]]
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batches": 3},
    "3 partitions": {"partitions": 3, "micro_batches": 3},
    "3 partitions again": {"partitions": 3, "micro_batches": 4, "checkpointing": "always"},
    "2 partitions again": {"partitions": 2, "micro_batches": 4, "checkpointing": "except_last"},
}


def a_run(comm: MPI.Intracomm, path: Path, keys: NetworkKeys, **more: Any) -> RunFile:
    """Two steps of six tiles: a second step swaps to what the first has given back."""
    (scene,) = scenes_of(path, [(61, 83)], comm)
    return replace(run_file(path, [scene], keys, **{"tiles": TileKeys(2, 3), **more}), steps=2)


def outcome(run: RunFile, comm: MPI.Intracomm) -> Outcome:
    """Rows of history, and weights."""
    assert train(run, comm=comm) == 0
    comm.Barrier()
    left = rows(run), weights(run)
    comm.Barrier()
    return left


def outcome_of_swapping(run: RunFile, comm: MPI.Intracomm, wanted: Outcome) -> Outcome:
    """Of a run that swaps: the same as wanted."""
    found = outcome(replace(run, output=f"{run.output}-{run.swap}"), comm)
    assert [row["loss"] for row in found[0]] == [row["loss"] for row in wanted[0]]
    assert same_tensors(found[1], wanted[1])
    return found


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["same-nearest", "valid"])
@pytest.mark.parametrize("pipeline", RUNS)
def test_swapping_everything(
    comm: MPI.Intracomm, shared_path: Path, name: str, pipeline: str
) -> None:
    run = a_run(comm, shared_path, NETWORKS[name], **RUNS[pipeline])
    wanted = outcome(run, comm)
    found, _ = outcome_of_swapping(replace(run, swap="all", swapping=ALL), comm, wanted)
    assert all(row["swap_out_count"] == "0" for row in wanted[0])
    assert all(int(row["swap_out_bytes"]) > 0 < int(row["swap_in_bytes"]) for row in found)
    assert all(int(row["peak_host_bytes"]) > 0 for row in found)


@pytest.mark.ranks((1, 3))
@pytest.mark.parametrize("pipeline", ["plain", "3 partitions", "3 partitions again"])
@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_with_halos_exchanged(
    comm: MPI.Intracomm, shared_path: Path, norm: Any, pipeline: str
) -> None:
    keys = replace(NETWORKS["same-nearest"], norm=norm)
    more = {**RUNS[pipeline], "micro_batches": 1, "tiles": TileKeys(), "halo_mode": "exchange"}
    run = a_run(comm, shared_path, keys, **more)
    swapping = replace(run, swap="all", swapping=ALL)
    found, _ = outcome_of_swapping(swapping, comm, outcome(run, comm))
    assert all(int(row["swap_out_bytes"]) > 0 for row in found)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("pipeline", RUNS)
def test_only_what_must(
    comm: MPI.Intracomm, shared_path: Path, pipeline: str, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = NetworkKeys(poolings=2, base=8, dropout=0.3)
    run = a_run(comm, shared_path, keys, **RUNS[pipeline])
    auto = replace(run, swap="auto", swapping=SwappingKeys(min_mib=0))
    wanted = outcome(run, comm)
    found, _ = outcome_of_swapping(auto, comm, wanted)
    said = comm.bcast(capfd.readouterr().err)
    assert "swap: auto: nothing: it fits; " in said
    assert all(row["swap_out_bytes"] == "0" for row in found)
    needed = float(re.search(r"without (\S+) MiB", said)[1])
    limit = SwappingKeys(min_mib=0, device_gib=0.9 * needed / 1024)
    tight = replace(auto, swapping=limit, output=f"{run.output}-tight")
    found, _ = outcome_of_swapping(tight, comm, wanted)
    said = comm.bcast(capfd.readouterr().err)
    chosen = re.search(r"swap: auto: (.*); predicted (\S+) MiB on .*, there is (\S+) MiB", said)
    assert float(chosen[2]) <= float(chosen[3]) + 0.01 < needed
    assert "swapped" in chosen[1] or "computed again" in chosen[1] or "on the host" in chosen[1]
    moves = "swapped" in chosen[1] or "on the host" in chosen[1]
    assert all((int(row["swap_out_bytes"]) > 0) == moves for row in found)


@pytest.mark.parametrize("crop_px", [None, 64])
def test_steps_of_the_largest_image_must_fit(
    comm: MPI.Intracomm, shared_path: Path, crop_px: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whichever image, or crop at an edge, the first step has."""
    sizes = [(40, 36), (100, 120), (44, 200)]
    scenes = [
        random_scene(shared_path, size, seed, write=comm.rank == 0)
        for seed, size in enumerate(sizes)
    ]
    comm.Barrier()
    auto = SwappingKeys(min_mib=0)
    run = run_file(shared_path, scenes, NetworkKeys(poolings=2, base=8), swap="auto", swapping=auto)
    # A tile per rank, rows first; the network's total stride is 4.
    run = replace(run, batch_size=1, mesh=MeshKeys(1, comm.size, 1), crop_px=crop_px, steps=1)
    said = set()
    for seed in range(6):
        one = replace(run, seed=seed, output=f"{shared_path}/{seed}")
        assert train(one, comm=comm) == 0
        said.add(re.search(r"without (\S+ .iB)", comm.bcast(capfd.readouterr().err))[1])
    assert len(said) == 1
    alone = replace(run, crop_px=None, output=f"{shared_path}/alone")
    largest = scenes[1]
    if crop_px is not None:
        largest = random_scene(shared_path, (crop_px, crop_px), 3, write=comm.rank == 0)
    comm.Barrier()
    alone = replace(alone, images=[str(largest.image)], labels=[str(largest.labels)])
    assert train(alone, comm=comm) == 0
    wanted = re.search(r"without (\S+ .iB)", comm.bcast(capfd.readouterr().err))[1]
    assert said == {wanted}


@pytest.mark.ranks(3)
def test_the_rank_with_least_room_decides(
    comm: MPI.Intracomm,
    shared_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = a_run(comm, shared_path, NETWORKS["valid"], swap="auto")
    monkeypatch.setattr(run_swap, "_limit_bytes", lambda *_: (9 - comm.rank) << 30)
    assert train(replace(run, steps=1), comm=comm) == 0
    said = comm.bcast(capfd.readouterr().err)
    assert f"there is {10 - comm.size}.00 GiB" in said


@pytest.mark.ranks(2)
def test_ranks_share_a_nodes_memory_and_momentum_takes_some(
    comm: MPI.Intracomm,
    shared_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = replace(machine("local"), memory_bytes=10 << 30)
    monkeypatch.setattr("tilenet.training.setup.swap.machine", lambda _: node)
    run = replace(a_run(comm, shared_path, NetworkKeys(poolings=2, base=64), swap="auto"), steps=0)
    needed = []
    for momentum in (0.0, 0.9):
        keys = replace(run.optimizer, momentum=momentum)
        one = replace(run, optimizer=keys, output=f"{run.output}-{momentum}")
        assert train(one, comm=comm) == 0
        said = comm.bcast(capfd.readouterr().err)
        assert f"there is {9 / comm.size:.2f} GiB" in said
        needed.append(float(re.search(r"without (\S+) MiB", said)[1]))
    parameters = int(re.search(r"([\d,]+) parameters", said)[1].replace(",", ""))
    assert needed[1] - needed[0] == pytest.approx(8 * parameters / 2**20, abs=0.02)


@pytest.mark.ranks(2)
def test_a_rank_that_cannot_tell_its_memory_fails_on_all(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(a_run(comm, shared_path, NETWORKS["same-nearest"]), swap="auto")

    def broken(*given: Any) -> int:
        if comm.rank == comm.size - 1:
            raise TilenetError("machines.toml must be readable")
        return 2**40

    monkeypatch.setattr(run_swap, "_limit_bytes", broken)
    with pytest.raises(AgreedError, match=r"machines\.toml must be readable"):
        train(run, comm=comm)
