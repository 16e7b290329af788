"""Files get their names once the disk holds them, and the disk holds the names too."""

from pathlib import Path

import numpy as np
import rasterio

from tilenet.mapping.writing.target import put_map
from tilenet.storage import atomic as aside


def test_a_text_is_on_the_disk_before_its_name_and_the_name_after_it(
    tmp_path: Path, acts: list[tuple[str, str]]
) -> None:
    text = str(np.random.default_rng(3).normal(size=40))
    aside.write_aside(text, tmp_path / "plan.json", "a plan")
    assert (tmp_path / "plan.json").read_text() == text + "\n"
    assert acts == [
        ("sync", str(tmp_path / ".plan.json.part")),
        ("rename", str(tmp_path / "plan.json")),
        ("sync", str(tmp_path)),
    ]


def test_a_map_and_its_names_are_on_the_disk_before_predict_is_done(
    tmp_path: Path, acts: list[tuple[str, str]]
) -> None:
    part, path = tmp_path / "part.tif", tmp_path / "map.tif"
    values = np.random.default_rng(5).integers(0, 3, (9, 13)).astype("uint8")
    size = {"count": 1, "height": 9, "width": 13, "dtype": "uint8"}
    with rasterio.open(part, "w", driver="GTiff", crs="EPSG:32630", **size) as file:
        file.write(values, 1)
    put_map(str(part), str(path), ("water", "forest"))
    assert acts == [
        ("sync", f"{part}.names"),
        ("rename", f"{path}.aux.xml"),
        ("sync", str(tmp_path)),
        ("sync", str(path.parent / f".{path.stem}.qml.part")),
        ("rename", str(path.with_suffix(".qml"))),
        ("sync", str(tmp_path)),
        ("sync", str(part)),
        ("rename", str(path)),
        ("sync", str(tmp_path)),
    ]
