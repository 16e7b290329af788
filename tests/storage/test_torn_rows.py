"""Tables whose last row was cut off, by a kill or a full disk, and tables that were damaged."""

from pathlib import Path

import pytest

from tilenet.errors import TilenetError
from tilenet.storage.tables import COLUMNS, History, read_run_table

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
