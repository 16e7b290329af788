"""A run as text is the same run when it is read again."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tilenet.training.config.keys import (
    AugmentKeys,
    MeshKeys,
    NetworkKeys,
    OptimizerKeys,
    ScheduleKeys,
    TileKeys,
    VectorKeys,
)
from tilenet.training.config.read import parser, read_run_file, run_file_text
from tilenet.training.config.run_file import RunFile

PLAIN = RunFile(images="a.tif", labels="b.tif", classes=3, output="run", steps=7)
NAMES = ["no", "Yes", "null", "1", "2.5", "ground: soil", "# x", "é\u2028", "<script>", "-", ""]
NAMES += ["🌲 ash", "1e-5", "2020-01-01"]

EVERYTHING = RunFile(
    images="a.tif",
    labels="b.tif",
    classes=2,
    output="out",
    bands=[3, 1],
    ignore_index=9,
    vectors=VectorKeys(
        field="kind",
        classes={"house": 1, 7: 0, 1.5: 1, True: 0, None: None, "no": 1},
        priority=[1, 0],
        all_touched=True,
        burn=0,
        background="ignore",
        layer="land use",
        crs="EPSG:2953",
    ),
    nodata="none",
    resolution=0.3,
    network=NetworkKeys(preset="medium-2", base=8, norm="batch", dropout=0.25, bias=True),
    mesh=MeshKeys(2, 3, 1),
    tiles=TileKeys(rows=4, columns=5),
    halo=96,
    epochs=7,
    crop_px=192,
    batch_size=6,
    optimizer=OptimizerKeys("sgd", 0.5, 0.9, 1e-4, True, 2.0),
    schedule=ScheduleKeys("step", 2.0, 9, [10, 30], 0.2, 1e-6),
    augment=AugmentKeys(True, True, 0.1, 0.2, 0.05),
    loss="focal",
    focal_gamma=1.5,
    class_weights=[1.0, 2.5],
    seed=12,
    precision="float64",
    device="cpu",
    init="w.safetensors",
    checkpoint_every=5,
)


@pytest.mark.parametrize(
    "run",
    [
        PLAIN,
        EVERYTHING,
        replace(PLAIN, images=["a b.tif", "c\n\t+d.tif"], labels=["~", "on.gpkg"], classes=NAMES),
        replace(PLAIN, optimizer=OptimizerKeys(lr=1e-05, weight_decay=1.5e-20, clip_norm=1e22)),
        replace(PLAIN, nodata=-3.4028234663852886e38, resolution=0.1 + 0.2, bands=[4, "nir", 1]),
        replace(
            PLAIN, network=NetworkKeys(module="a:b", options={"c": None, "d": [1, {"e": 1e-4}]})
        ),
        replace(PLAIN, network=NetworkKeys(module="a:b", options={})),
        replace(PLAIN, images="R.tif+G.tif", nodata="collar", swap="all", init="x/y"),
        replace(PLAIN, class_weights="auto", balance=[3, 4], device=["cpu", "cpu"], halo=96),
    ],
)
def test_the_text_gives_the_same_run(run: RunFile, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(run_file_text(run), encoding="utf-8")
    plain = yaml.safe_load(path.read_text(encoding="utf-8"))  # as other programs read it
    assert plain["optimizer"]["lr"] == run.optimizer.lr
    assert plain["classes"] == run.classes
    again, _ = read_run_file(["-c", str(path)])
    assert again == run


def test_the_help_says_what_each_key_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--schedule.factor FACTOR of `step` (type: float, default: 0.1)" in said
    assert "label of pixels that do not count" in said
