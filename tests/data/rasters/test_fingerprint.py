"""Files are told apart by what the folder says of them, those that belong together as one."""

import os
from pathlib import Path

from tilenet.data.rasters.fingerprint import files_beside, fingerprint


def test_a_shapefile_is_all_its_files(tmp_path: Path) -> None:
    for name in ("a[1].shp", "a[1].dbf", "a[1].prj", "a1.shp", "a[1]b.shp", "a[1].gpkg-wal"):
        (tmp_path / name).write_text(name)
    found = [Path(path).name for path in files_beside(str(tmp_path / "a[1].shp"))]
    assert sorted(found) == ["a[1].dbf", "a[1].gpkg-wal", "a[1].prj", "a[1].shp"]
    assert str(tmp_path / "none.shp") in files_beside(str(tmp_path / "none.shp"))


def test_a_folder_is_all_that_it_holds(tmp_path: Path) -> None:
    (tmp_path / "a.gdb" / "inside").mkdir(parents=True)
    for name in ("one", "inside/two"):
        (tmp_path / "a.gdb" / name).write_text(name)
    found = files_beside(str(tmp_path / "a.gdb"))
    assert [Path(path).name for path in found] == ["two", "one"]


def test_a_fingerprint_tells_size_and_date_and_name(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    os.utime(path, ns=(5, 10**18))
    seen = {fingerprint([str(path)])}
    assert seen == {((str(path), 3, 10**18),)}
    os.utime(path, ns=(5, 10**18 + 1))
    seen.add(fingerprint([str(path)]))
    path.write_text("four")
    os.utime(path, ns=(5, 10**18))
    seen.add(fingerprint([str(path)]))
    assert len(seen) == 3
    assert fingerprint([str(path), "/vsizip/a.zip/b.tif"]) is None
