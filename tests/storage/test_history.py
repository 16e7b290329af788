"""`history.csv`: every float to its last bit, every row at once."""

import csv
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from tilenet.errors import TilenetError
from tilenet.storage.tables import COLUMNS, History


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def values_of(step: int) -> list[float]:
    rng = np.random.default_rng(step)
    return (rng.normal(size=len(COLUMNS) - 1) * 10.0 ** rng.integers(-300, 300)).tolist()


def test_floats_are_written_to_their_last_bit_and_at_once(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    history = History(path, 0)
    assert rows_of(path) == [list(COLUMNS)]
    for step in range(1, 51):
        history.add(step, *values_of(step))
        row = rows_of(path)[-1]
        assert row[0] == str(step)
        assert [float(text) for text in row[1:]] == values_of(step)
    history.close()
    assert path.read_bytes().count(b"\n") == 51
    assert b"\r" not in path.read_bytes()


@pytest.mark.parametrize("steps_done", [0, 1, 7, 11, 30])
def test_a_resumed_run_drops_the_rows_that_it_repeats(tmp_path: Path, steps_done: int) -> None:
    path = tmp_path / "history.csv"
    history = History(path, 0)
    for step in range(1, 12):
        history.add(step, *values_of(step))
    history.close()
    kept = list(range(1, min(steps_done, 11) + 1))
    history = History(path, steps_done)
    assert [row[0] for row in rows_of(path)] == ["step", *(str(step) for step in kept)]
    history.add(steps_done + 1, *values_of(99))
    history.close()
    *old, new = rows_of(path)[1:]
    assert [[float(x) for x in row[1:]] for row in old] == [values_of(step) for step in kept]
    assert [float(x) for x in new[1:]] == values_of(99)
    assert os.listdir(tmp_path) == ["history.csv"]


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ([1, 2, 3, 9, 10], "step 9 follows step 3"),
        ([2, 3, 4], "step 11 follows step 4"),
        ([1, 2, 3, 3, *range(4, 11)], "step 3 follows step 3"),
        ([1, 2, 3, 5, 4, *range(6, 11)], "step 5 follows step 3"),
        ([], None),
        ([7, 8, 9, 10], None),  # the one before was moved away
        ([*range(1, 11)], None),
        ([*range(1, 14)], None),  # the run was killed before the checkpoint of step 13
    ],
)
def test_a_history_that_must_be_whole_is_refused_where_it_is_not(
    tmp_path: Path, steps: list[int], wrong: str | None
) -> None:
    path = tmp_path / "history.csv"
    rows = [[str(step), *map(str, values_of(step))] for step in steps]
    path.write_text("".join(",".join(row) + "\n" for row in [COLUMNS, *rows]))
    before = path.read_bytes()
    if wrong is None:
        History(path, 10, whole=True).close()
    else:
        with pytest.raises(TilenetError, match=rf"of step 10 \(.*csv: {wrong}\).*move it"):
            History(path, 10, whole=True)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["history.csv"]
        History(path, 10).close()
    kept = [step for step in steps if step <= 10]
    assert [row[0] for row in rows_of(path)[1:]] == [str(step) for step in kept]


def test_a_checkpoint_that_claims_more_steps_than_memory_holds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    rows = [[str(step), *map(str, values_of(step))] for step in (1, 2, 4)]
    path.write_text("".join(",".join(row) + "\n" for row in [COLUMNS, *rows]))
    with pytest.raises(TilenetError, match=r"4503599627370496 \(.*: step 4 follows step 2\)"):
        History(path, 1 << 52, whole=True)


def test_a_table_is_on_the_disk_once_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{handle}"), os.fstat(handle).st_size))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "history.csv"
    history = History(path, 0)
    # The table before it gets its name, then the folder that names it.
    assert [where for where, _ in synced] == [str(tmp_path / ".history.csv.part"), str(tmp_path)]
    history.add(1, *values_of(1))
    history.sync()
    assert synced[2:] == [(str(path), path.stat().st_size)]
    history.close()


def test_a_resumed_run_without_history_begins_one(tmp_path: Path) -> None:
    history = History(tmp_path / "history.csv", 5)
    history.add(6, *values_of(5))
    assert [row[0] for row in rows_of(tmp_path / "history.csv")] == ["step", "6"]
    history.close()


def test_rows_with_fewer_columns_keep_their_values_and_leave_the_others_empty(
    tmp_path: Path,
) -> None:
    path = tmp_path / "history.csv"
    old = ["step", "loss", "seconds", "weight_sum", "of another version"]
    path.write_text(f"{','.join(old)}\n1,0.25,3.5,70,x\n2,0.75,4.5\n")
    history = History(path, 2)
    history.add(3, *values_of(3))
    history.close()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [len(row) for row in rows_of(path)] == [len(COLUMNS)] * 4
    assert list(rows[0].values())[:4] == ["1", "0.25", "70", "3.5"]
    assert list(rows[1].values())[:4] == ["2", "0.75", "", "4.5"]
    assert [set(list(row.values())[4:]) for row in rows[:2]] == [{""}, {""}]
    assert [float(value) for value in list(rows[2].values())[1:]] == values_of(3)


def test_another_table_has_its_own_columns_and_empty_values(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    columns = ("step", "a, b", "c")
    table = History(path, 0, columns)
    table.add_rows([(1, 0.1, None), (1, 2**53 - 1, 3), (2, None, 1e-300)])
    table.close()
    table = History(path, 1, columns)
    assert table.rows() == [
        {"step": "1", "a, b": "0.10000000000000001", "c": ""},
        {"step": "1", "a, b": "9007199254740991", "c": "3"},
    ]
    table.add(2, 7, None)
    table.close()
    assert rows_of(path)[-1] == ["2", "7", ""]
    with pytest.raises(TilenetError, match=r"^cells.csv must be writable \("):
        History(tmp_path / "nowhere" / "cells.csv", 0, columns)


def test_a_history_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TilenetError, match=r"must be writable \(.*Is a directory\)"):
        History(tmp_path, 0)
    with pytest.raises(TilenetError, match=r"must be writable \(.*No such file"):
        History(tmp_path / "nowhere" / "history.csv", 3)


def test_a_row_that_finds_no_room_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    history = History(path, 0)
    history.add(1, *values_of(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))
    try:
        with pytest.raises(TilenetError, match=r"to its end \(.*File too large.*--resume"):
            history.add(2, *values_of(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        history.close()
    assert [float(x) for x in rows_of(path)[1][1:]] == values_of(1)
