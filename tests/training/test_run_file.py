"""Run files: overrides, groups of keys, what follows from them, and that their text says all."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.geometry.unet import PRESETS, UNetOptions
from tilenet.training.config.keys import (
    AugmentKeys,
    MeshKeys,
    NetworkKeys,
    OptimizerKeys,
    ScheduleKeys,
    TileKeys,
)
from tilenet.training.config.read import parser, read_run_file, run_file_text
from tilenet.training.config.run_file import RunFile
from tilenet.training.setup.architecture import Architecture

LEAST = "images: a.tif\nlabels: b.tif\nclasses: 2\noutput: out\n"


def read(folder: Path, text: str, *options: str) -> RunFile:
    path = folder / "run.yaml"
    path.write_text(LEAST + text)
    return read_run_file(["-c", str(path), *options])[0]


def a_run(**change: Any) -> RunFile:
    least = {"images": "a.tif", "labels": "b.tif", "classes": 2, "output": "out", "steps": 1}
    return RunFile(**(least | change))


def test_dotted_options_override_single_keys(tmp_path: Path) -> None:
    network = "network: {preset: small, norm: batch}\nsteps: 3\noptimizer: {weight_decay: 0.5}\n"
    options = ["--network.norm=none", "--steps", "9", "--optimizer.lr", "2"]
    options += ["--class_weights", "auto", "--augment.noise", "0.5"]
    found = read(tmp_path, network, *options)
    assert found.network == NetworkKeys(preset="small", norm="none")
    assert found.steps == 9
    assert found.optimizer == OptimizerKeys(lr=2.0, weight_decay=0.5)
    assert (found.class_weights, found.augment) == ("auto", AugmentKeys(noise=0.5))


def test_an_exponent_makes_a_number_and_a_date_stays_a_text(tmp_path: Path) -> None:
    """Also where no type is declared; YAML 1.1 has it the other way round."""
    found = read(tmp_path, "steps: 1\nnetwork: {module: 'a:b', options: {x: [1e-4, 2020-01-02]}}")
    assert found.network.options == {"x": [1e-4, "2020-01-02"]}


def test_a_run_needs_no_file() -> None:
    found, flags = read_run_file(
        ["--images=a.tif", "--labels=b.tif", "--classes=[sea, land]", "--output=out", "--steps=4"]
    )
    assert found == a_run(classes=["sea", "land"], steps=4)
    assert (flags.resume, flags.overwrite) == (False, False)
    flags = read_run_file(
        ["--images=a", "--labels=b", "--classes=2", "--output=o", "--steps=1"]
        + ["--resume", "--overwrite"]
    )[1]
    assert (flags.resume, flags.overwrite) == (True, True)


@pytest.mark.parametrize("word", ["off", "'off'", "no", "false"])
def test_swap_off_is_off_although_yaml_reads_it_as_false(tmp_path: Path, word: str) -> None:
    assert read(tmp_path, f"steps: 1\nswap: {word}\n").swap == "off"


@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        ("", [], range(0)),
        ("profile: {steps: 40-60}", [], range(40, 61)),
        ("profile: {steps: '40-60'}", [], range(40, 61)),
        ("profile: {steps: 7}", [], range(7, 8)),
        ("profile: {steps: 7}", ["--profile.steps", "3-3"], range(3, 4)),
        ("profile: {steps: 7}", ["--profile.steps=null"], range(0)),
    ],
)
def test_steps_of_a_profile_are_a_range_or_one(
    tmp_path: Path, text: str, options: list[str], wanted: range
) -> None:
    found = read(tmp_path, f"steps: 99\n{text}\n", *options).profile.numbers
    assert list(found) == list(wanted)


@pytest.mark.parametrize(
    ("text", "bands", "names"),
    [
        ("[red, nir]", ["red", "nir"], ("red", "nir")),
        ("[4, 3, 2]", [4, 3, 2], None),
        ("[4, red]", [4, "red"], (None, "red")),
        ("[B04, N]", ["B04", "N"], ("B04", "N")),
    ],
)
def test_bands_are_numbers_names_or_both(
    tmp_path: Path, text: str, bands: list[int | str], names: tuple[str | None, ...] | None
) -> None:
    for found in (
        read(tmp_path, f"steps: 1\nbands: {text}\n"),
        read(tmp_path, "steps: 1\n", "--bands", text),
    ):
        assert (found.bands, found.band_names) == (bands, names)


def test_one_image_or_several_and_classes_by_number_or_name() -> None:
    assert a_run().image_paths == ("a.tif",)
    assert a_run().label_paths == ("b.tif",)
    assert a_run(classes=3).class_names == ("0", "1", "2")
    several = a_run(images=["a", "c"], labels=["b", "d"], classes=["sea", "land"])
    assert several.image_paths == ("a", "c")
    assert several.label_paths == ("b", "d")
    assert several.class_names == ("sea", "land")


@pytest.mark.parametrize(
    ("loss", "terms"),
    [("ce", ("ce",)), ("dice", ("dice",)), ("focal", ("focal",)), ("ce+dice", ("ce", "dice"))],
)
def test_a_loss_is_a_sum_of_terms(loss: Any, terms: tuple[str, ...]) -> None:
    """Of whole words: dice ends in ce."""
    assert a_run(loss=loss).loss_terms == terms


# --- the network


def options(keys: NetworkKeys, bands: int, classes: int) -> UNetOptions | None:
    return Architecture.of(keys, bands, classes, 0).options


def test_keys_of_the_network_change_the_presets_or_the_defaults() -> None:
    assert options(NetworkKeys(), 3, 5) == UNetOptions(bands=3, classes=5)
    found = options(NetworkKeys(preset="large", base=8, dropout=0.0, bias=False), 3, 5)
    assert found == replace(PRESETS["large"], base=8, dropout=0.0, bias=False, bands=3, classes=5)
    given = NetworkKeys(None, 2, 3, 6, 5, "valid", "bilinear", "group", "tile", 3, 0.5, True)
    wanted = UNetOptions(2, 3, 6, 4, 7, 5, "valid", "bilinear", "group", "tile", 3, 0.5, True)
    assert options(given, 4, 7) == wanted


@pytest.mark.parametrize(
    ("keys", "epsilon"),
    [
        (NetworkKeys(preset="small"), 92),
        (NetworkKeys(preset="medium-1"), 230),
        (NetworkKeys(preset="large"), 380),
        (NetworkKeys(preset="large", poolings=4), 92),
        (NetworkKeys(preset="small", convolutions=5), 230),
        (NetworkKeys(poolings=4, convolutions=2), 92),
        (NetworkKeys(poolings=4, convolutions=2, kernel=5), 184),
    ],
    ids=str,
)
def test_the_papers_halo_counts_one_level_less_for_its_own_models(
    keys: NetworkKeys, epsilon: int
) -> None:
    assert Architecture.of(keys, 4, 2, 0).epsilon_px == epsilon


# --- a run as text is the same run when it is read again


PLAIN = a_run(classes=3)
NAMES = ["no", "Yes", "null", "1", "2.5", "ground: soil", "# x", "é\u2028", "<script>", "-", ""]
NAMES += ["🌲 ash", "1e-5", "2020-01-01"]

EVERYTHING = a_run(
    steps=None,
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
    schedule=ScheduleKeys("step", 0.9, 9, [10, 30], 0.2, 1e-6),
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
        replace(PLAIN, images=("a b.tif", "c\n\t+d.tif"), labels=("~", "on.gpkg"), classes=NAMES),
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
    assert "--schedule.factor FACTOR factor of `step` (type: float, default: 0.1)" in said
    assert "label of pixels that do not count" in said


def test_reading_takes_as_long_as_the_file(tmp_path: Path) -> None:
    parser()

    def calls(count: int) -> int:
        """Calls of functions that reading a run file of `count` images takes."""
        made = 0

        def count_one(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event == "call"

        files = {"images": [f"{n}.tif" for n in range(count)], "labels": ["b.tif"] * count}
        path = tmp_path / "many.yaml"
        path.write_text(yaml.safe_dump(files | {"classes": 2, "output": "out", "steps": 1}))
        sys.setprofile(count_one)
        try:
            assert len(read_run_file(["-c", str(path)])[0].image_paths) == count
        finally:
            sys.setprofile(None)
        return made

    few, some, many = map(calls, (100, 200, 400))
    assert many - some < 2.2 * (some - few)
