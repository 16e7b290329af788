"""What is swapped in a run: in each step's row, and in total at its end."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from left_by_runs import rows
from mpi4py import MPI
from test_same_as_whole_image import NETWORKS, run_file, scenes_of

from tilenet.library.whole_run import train
from tilenet.parallel.health.rank_times import RankTimes
from tilenet.parallel.swap.statistics import SwapCounts, SwapStatistics
from tilenet.training.config.keys import SwappingKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.folder.record import RunAccount
from tilenet.training.loop import Loop

pytestmark = pytest.mark.ranks(1, 3)

COUNTS = ("swap_out_bytes", "swap_out_count", "swap_in_bytes", "swap_in_count")
PEAKS = ("peak_active_bytes", "peak_host_bytes")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Jobs that were made."""
    made: list[Any] = []

    begin = Loop.run

    def noted(self: Loop, *given: Any) -> bool:
        made.append(self)
        return begin(self, *given)

    monkeypatch.setattr(Loop, "run", noted)
    return made


EVERYTHING: dict[str, Any] = {"swap": "all", "swapping": SwappingKeys(min_mib=0)}


def a_run(comm: MPI.Intracomm, path: Path) -> RunFile:
    (scene,) = scenes_of(path, [(97, 131)], comm)
    return run_file(path, [scene], NETWORKS["same-nearest"], tiles=TileKeys(2, 2))


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def test_rows_add_up_to_the_run_and_ranks_to_what_is_said(
    comm: MPI.Intracomm,
    shared_path: Path,
    jobs: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = replace(a_run(comm, shared_path), **EVERYTHING)
    assert train(run, comm=comm) == 0
    said, steps = capsys.readouterr().err, rows(run)
    ranks: list[SwapCounts] = comm.allgather(jobs[0].account.swaps)
    # the same run once more, in which nothing is reset: its last row has the run's totals
    monkeypatch.setattr(SwapStatistics, "reset", lambda self: None)
    again = replace(run, output=str(shared_path / "again"))
    assert train(again, comm=comm) == 0
    total = rows(again)[-1]
    assert [row["loss"] for row in rows(again)] == [row["loss"] for row in steps]
    for name in COUNTS:
        assert all(int(row[name]) > 0 for row in steps)
        assert sum(int(row[name]) for row in steps) == int(total[name])
        assert int(total[name]) == getattr(ranks[0], name.removeprefix("swap_"))
    for name in PEAKS:
        assert max(int(row[name]) for row in steps) == int(total[name]) == getattr(ranks[0], name)
    assert all(float(row["swap_wait_seconds"]) > 0 for row in steps)
    waits = sum(float(row["swap_wait_seconds"]) for row in steps)
    assert waits == pytest.approx(ranks[0].wait_seconds, rel=1e-12)
    if comm.rank > 0:
        assert "swapped: " not in said
        return
    longest = max(rank.wait_seconds for rank in ranks)
    wanted = [
        f"swapped: {mib(sum(rank.out_bytes for rank in ranks))} out "
        f"({sum(rank.out_count for rank in ranks):,} tensors), "
        f"{mib(sum(rank.in_bytes for rank in ranks))} in "
        f"({sum(rank.in_count for rank in ranks):,}); of a rank at most "
        f"{mib(max(rank.peak_host_bytes for rank in ranks))} were out and ",
        f"; {longest:.1f} s waited of ",
    ]
    assert [part for part in wanted if said.count(part) != 1] == []


def test_where_nothing_is_swapped_columns_are_zeros_and_nothing_is_said(
    comm: MPI.Intracomm, shared_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(comm, shared_path)
    assert train(run, comm=comm) == 0
    assert len(rows(run)) == 3
    for row in rows(run):
        assert {row[name] for name in (*COUNTS, *PEAKS, "swap_wait_seconds")} == {"0"}
    assert "swapped" not in capsys.readouterr().err


def test_counts_add_and_of_peaks_the_larger_stays() -> None:
    a, b = SwapCounts(7, 11, 3, 12, 4, 900, 0.5), SwapCounts(90, 2, 1, 5, 2, 80, 0.25)
    assert a + b == b + a == SwapCounts(90, 13, 4, 17, 6, 900, 0.75)
    assert a + SwapCounts() == a


def test_sums_over_ranks_peaks_of_one_and_the_longest_wait_are_said(
    comm: MPI.Intracomm, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [
        SwapCounts(n << 20, n << 31, 1000 * n, n << 30, 10 * n, n << 10, n / 4)
        for n in (comm.size - rank + (rank == comm.size - 1) * 20 for rank in range(comm.size))
    ]
    account = RunAccount()
    account.swaps, account.times = ranks[comm.rank], RankTimes(seconds=50.0 + comm.rank)
    account.say_swaps(comm)
    total, longest = sum(rank.out_count for rank in ranks) // 1000, comm.size - 1
    most = ranks[longest].peak_host_bytes >> 10
    wanted = (
        f"swapped: {2 * total}.0 GiB out ({1000 * total:,} tensors), {total}.0 GiB in "
        f"({10 * total:,}); of a rank at most {most}.0 KiB were out and {most}.0 MiB waited for "
        f"backward on its devices; {most / 4:.1f} s waited of {50 + longest}.0 s"
        + " on the rank that waited longest"
        * (comm.size > 1)
    )
    assert capsys.readouterr().err == (f"{wanted}\n" if comm.rank == 0 else "")
