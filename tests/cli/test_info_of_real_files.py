"""`tilenet info` on real imagery, against rasterio and numpy."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from info_answers import Info

LABELS = {
    "fair_uganda_z21_rgb.tif": ["fair_uganda_z21_buildings.tif"],
    "fair_set1_z21_rgb.tif": ["fair_set1_z21_buildings.tif"],
    "massachusetts_23429155_15_uint16.tif": ["massachusetts_23429155_15.gpkg"],
    "sample_geotiff.tif": ["geotiff_labels.geojson"],
    "new_brunswick_2of2.tif": ["new_brunswick_BakerLake.gpkg"],
    "SN7_int16_4band.tif": ["SN7_buildings.geojson"],
}
REFUSED = {
    "sample_geotiff_custom_proj.tif": ("geotiff_custom_proj_labels.geojson", "in degrees"),
    "santa_monica_2020_91.tif": ("santa_monica_2020_91.json", "must be polygons"),
    "claremont_2020_10.tif": ("claremont_2020_10.json", "must be polygons"),
    "umbra_mount_yasur_rotated.tif": ("SN_Vegas_WV03.gpkg", "must overlap their image"),
    "pix4d_rgba_alpha.tif": ("opengeos_naip5m_4band.tif", "labels must be one band"),
}


@pytest.mark.real
def test_real_files_are_described_or_refused_by_the_right_sentence(real: Path, info: Info) -> None:
    bare = sorted(path.name for path in real.glob("*.tif") if path.name not in LABELS | REFUSED)
    for name in bare:
        (found,) = info.asked(str(real / name), "--pixels")
        check_statistics(real / name, found)
    for name, labels in LABELS.items():
        (found,) = info.asked(str(real / name), "--labels", str(real / labels[0]), "--pixels")
        assert sum(count > 0 for count in found["labels"]["class_pixels"]) == 2
        if name != "fair_set1_z21_rgb.tif":
            check_statistics(real / name, found)
    for name, (other, said) in REFUSED.items():
        (found,) = info.asked(str(real / name), "--labels", str(real / other), "--pixels", code=1)
        assert said in found["refused"]
        check_statistics(real / name, found)
    constant = info.asked(str(real / "SN7_int16_4band.tif"), "--pixels")[0]["notes"]
    assert any("4 (255); leave them out with bands: [1, 2, 3]" in note for note in constant)


def check_statistics(path: Path, found: dict[str, Any]) -> None:
    """Against rasterio and numpy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        with rasterio.open(path) as file:
            read = [band["number"] for band in found["bands"] if band["read"]]
            values, valid = file.read(read), file.dataset_mask() != 0
    assert found["pixels"]["num_valid"] == valid.sum()
    for band, ours in zip(found["pixels"]["bands"], values[:, valid], strict=True):
        assert (band["minimum"], band["maximum"]) == (ours.min(), ours.max())
        assert band["mean"] == pytest.approx(ours.mean(dtype=np.float64), rel=1e-12)
