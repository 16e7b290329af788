"""Tables: every float to its last bit, every row at once; rows cut off, and damaged ones."""

import csv
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from tilenet.errors import TilenetError
from tilenet.storage.tables import COLUMNS, History, read_run_table


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def values_of(step: int) -> list[float]:
    rng = np.random.default_rng(step)
    return (rng.normal(size=len(COLUMNS) - 1) * 10.0 ** rng.integers(-300, 300)).tolist()


def with_steps(folder: Path, steps: list[int]) -> Path:
    rows = [[str(step), *map(str, values_of(step))] for step in steps]
    path = folder / "history.csv"
    path.write_text("".join(",".join(row) + "\n" for row in [COLUMNS, *rows]))
    return path


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
    path = with_steps(tmp_path, steps)
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
    with pytest.raises(TilenetError, match=r"4503599627370496 \(.*: step 4 follows step 2\)"):
        History(with_steps(tmp_path, [1, 2, 4]), 1 << 52, whole=True)


def test_a_table_is_on_the_disk_once_it_is_synced(
    tmp_path: Path, acts: list[tuple[str, str]]
) -> None:
    path, part = str(tmp_path / "history.csv"), str(tmp_path / ".history.csv.part")
    history = History(Path(path), 0)
    assert acts == [("sync", part), ("rename", path), ("sync", str(tmp_path))]
    history.add(1, *values_of(1))
    history.sync()
    assert acts[3:] == [("sync", path)]
    assert len(rows_of(Path(path))) == 2
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


# --- tables whose last row was cut off, by a kill or a full disk, and damaged ones


TABLES = {
    "history.csv": COLUMNS,
    "validation.csv": ("step", "loss", "num_pixels", "iou_forest, dense", "f1_wasser\nüber"),
    "confusion.csv": ("step", "label", "predicted", "pixels"),
}


def whole(path: Path, columns: tuple[str, ...]) -> list[bytes]:
    """A table of three rows; its header, which may take several lines, and its rows."""
    table = History(path, 0, columns)
    header = path.read_bytes()
    for step in (1, 2, 3):
        table.add(step, *(step / (7 + n) for n in range(1, len(columns) - 1)), None)
    table.close()
    return [header, *path.read_bytes().removeprefix(header).splitlines(keepends=True)]


@pytest.mark.parametrize("name", TABLES)
def test_a_row_that_was_cut_off_at_any_byte_is_dropped(tmp_path: Path, name: str) -> None:
    path, columns = tmp_path / name, TABLES[name]
    *before, last = whole(path, columns)
    assert len(last) > 20
    for length in range(len(last)):
        path.write_bytes(b"".join(before) + last[:length])
        seen = read_run_table(path)
        assert seen is not None
        assert seen.columns["step"].tolist() == [1, 2]
        table = History(path, 3, columns)
        assert table.torn == (length > 0)
        assert path.read_bytes() == b"".join(before)
        table.add(3, *(3 / (7 + n) for n in range(1, len(columns) - 1)), None)
        table.close()
        assert path.read_bytes() == b"".join(before) + last
    table = History(path, 3, columns)
    table.close()
    assert not table.torn
    assert path.read_bytes() == b"".join(before) + last


def test_what_a_disk_left_of_a_row_is_dropped(tmp_path: Path) -> None:
    """After a loss of power the end of a file may be zeros, or bytes of others."""
    path = tmp_path / "history.csv"
    rows = whole(path, COLUMNS)
    path.write_bytes(b"".join(rows) + b"\0" * 77 + b'\xff\xfe,"')
    table = History(path, 3)
    table.close()
    assert table.torn
    assert path.read_bytes() == b"".join(rows)


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        *((b"\n2,", b"\n%b," % step, 3, "' is no step") for step in (b"x", b"0", b"1.0", b"")),
        (b"\n2,", "\n²,".encode(), 3, "'²' is no step"),
        (",".join(COLUMNS).encode() + b"\n", b"", 2, "'' is no step"),  # whose values are these?
        (b"\n2,", b'\n2,"' + b"9" * 200_000 + b'",', 3, "field larger than field limit"),
        (b"\n2,0.2", b"\n2,0_2", 3, r"'0_2\d+' is no number"),
        (b"\n1,0.1", b"\n1,0.1.", 2, r"'0\.1\.\d+' is no number"),
        (b"\n1,0.1", b"\n1,0\xff1", 2, r"'0\ufffd1.*is no number"),
        (b"\n2,0.2", b"\n2,\xd9\xa3", 3, "is no number"),  # a digit of another script
        (b"\n2,0.2", b"\n2,\0.2", 3, "is no number"),
    ],
)
def test_a_damaged_row_is_refused_by_its_line(
    tmp_path: Path, old: bytes, new: bytes, line: int, what: str
) -> None:
    path = tmp_path / "history.csv"
    text = b"".join(whole(path, COLUMNS))
    assert text.count(old) == 1
    path.write_bytes(text.replace(old, new))
    spoilt = path.read_bytes()
    with pytest.raises(TilenetError, match=rf"history\.csv, line {line}: .*--resume$") as caught:
        History(path, 3)
    assert "mend or delete that line" in str(caught.value)
    assert caught.match(what)
    assert path.read_bytes() == spoilt, "it is there to be mended"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_damage_in_rows_that_are_made_again_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    rows = whole(path, COLUMNS)
    path.write_bytes(b"".join(rows).replace(b"\n3,0.", b"\n3,?"))
    History(path, 2).close()
    assert path.read_bytes() == b"".join(rows[:3])


def test_rows_of_other_steps_than_those_named_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "confusion.csv"
    columns = TABLES[path.name]
    rows = whole(path, columns)
    History(path, 3, columns, {1, 3}).close()
    assert path.read_bytes() == b"".join([rows[0], rows[1], rows[3]])
