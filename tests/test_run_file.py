"""Run files: overrides, unknown keys, contradictions, and what is not built yet."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilenet.errors import TilenetError, UsageError
from tilenet.geometry.networks import PRESETS, UNetOptions
from tilenet.run_file import RunFile, network_options, paper_epsilon_px, read_run_file
from tilenet.run_keys import (
    AugmentKeys,
    GradientKeys,
    MeshKeys,
    NetworkKeys,
    OptimizerKeys,
    ProfileKeys,
    ScheduleKeys,
    SwappingKeys,
    TileKeys,
    VectorKeys,
)

LEAST = "images: a.tif\nlabels: b.tif\nclasses: 2\noutput: out\n"


def read(folder: Path, text: str, *options: str) -> RunFile:
    path = folder / "run.yaml"
    path.write_text(LEAST + text)
    return read_run_file(["-c", str(path), *options])[0]


def a_run(**change: Any) -> RunFile:
    least = {"images": "a.tif", "labels": "b.tif", "classes": 2, "output": "out", "steps": 1}
    return RunFile(**(least | change))


EVERYTHING = """
vectors:
  field: kind
  classes: {house: 1, 7: 0, 1.5: 1, true: 0, null: null, ruin: null}
  priority: [1, 0]
  all_touched: true
  burn: 0
  background: ignore
  layer: land use
  crs: EPSG:2953
bands: [3, 1]
ignore_index: 0
nodata: none
resolution: 0.3
network: {preset: medium-2, base: 8, norm: batch, dropout: 0.25, bias: true}
mesh: {replicas: 2, rows: 3, columns: 1}
tiles: {rows: 4, columns: 5}
halo: 96
epochs: 7
crop_px: 192
batch_size: 6
optimizer: {name: sgd, lr: 0.5, momentum: 0.9, weight_decay: 1e-4, nesterov: true, clip_norm: 2}
schedule: {name: step, warmup_steps: 9, milestones: [10, 30], factor: 0.2, min_lr: 1e-6, power: 2}
augment: {flips: true, rotations: true, brightness: 0.1, contrast: 0.2, noise: 0.05}
loss: focal
focal_gamma: 1.5
class_weights: [1, 2.5]
seed: 12
precision: float64
device: cpu
init: w.safetensors
checkpoint_every: 5
"""


def test_every_key_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, EVERYTHING, "--ignore_index", "9")
    assert found == RunFile(
        images="a.tif",
        labels="b.tif",
        classes=2,
        output="out",
        bands=[3, 1],
        ignore_index=9,
        vectors=VectorKeys(
            field="kind",
            classes={"house": 1, 7: 0, 1.5: 1, True: 0, None: None, "ruin": None},
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


def test_dotted_options_override_single_keys(tmp_path: Path) -> None:
    network = "network: {preset: small, norm: batch}\nsteps: 3\n"
    found = read(tmp_path, network, "--network.norm=none", "--steps", "9", "--optimizer.lr", "2")
    assert found.network == NetworkKeys(preset="small", norm="none")
    assert found.steps == 9
    assert found.optimizer == OptimizerKeys(lr=2.0)


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


def test_a_black_collar_and_stacks_are_said_in_words(tmp_path: Path) -> None:
    found = read(tmp_path, "steps: 1\nnodata: collar\nimages: [R.tif+G.tif]\nlabels: [l.tif]\n")
    assert (found.nodata, found.image_paths) == ("collar", ("R.tif+G.tif",))


def test_one_image_or_several_and_classes_by_number_or_name() -> None:
    assert a_run().image_paths == ("a.tif",)
    assert a_run().label_paths == ("b.tif",)
    assert a_run(classes=3).class_names == ("0", "1", "2")
    several = a_run(images=["a", "c"], labels=["b", "d"], classes=["sea", "land"])
    assert several.image_paths == ("a", "c")
    assert several.label_paths == ("b", "d")
    assert several.class_names == ("sea", "land")


# --- unknown keys and wrong types


@pytest.mark.parametrize(
    ("text", "unknown", "nearest"),
    [
        ("stpes: 3", "stpes", "steps"),
        ("netwrk: {preset: small}", "netwrk.preset", "network.preset"),
        ("network: {pooling: 3}", "network.pooling", "network.poolings"),
        ("mesh: {cols: 3}", "mesh.cols", "mesh.columns"),
        ("tiles: {size: 64}", "tiles.size", "tiles.size_px"),
        ("checkpoint_evry: 3", "checkpoint_evry", "checkpoint_every"),
    ],
)
def test_an_unknown_key_of_the_file_names_the_nearest_known_one(
    tmp_path: Path, text: str, unknown: str, nearest: str
) -> None:
    said = rf"unknown key {unknown}; the nearest known key is {nearest}\)$"
    with pytest.raises(UsageError, match=said) as raised:
        read(tmp_path, f"steps: 1\n{text}\n")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "unknown", "nearest"),
    [
        (["--stpes", "3"], "stpes", "steps"),
        (["--stpes=3"], "stpes", "steps"),
        (["--network.norm_scop", "tile"], "network.norm_scop", "network.norm_scope"),
        (["--optimizer.momentm=0.9"], "optimizer.momentm", "optimizer.momentum"),
    ],
)
def test_an_unknown_option_names_the_nearest_known_one(
    tmp_path: Path, options: list[str], unknown: str, nearest: str
) -> None:
    said = rf"unknown key {unknown}; the nearest known key is {nearest}\)$"
    with pytest.raises(UsageError, match=said):
        read(tmp_path, "steps: 1\n", *options)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("steps: many", "steps"),
        ("steps: 2.5", "steps"),
        ("halo: wide", "halo"),
        ("halo: 9.5", "halo"),
        ("bands: {red: 1}", "bands"),
        ("precision: float17", "precision"),
        ("network: {preset: tiny}", "network.preset"),
        ("network: {norm: layer}", "network.norm"),
        ("loss: hinge", "loss"),
        ("nodata: black", "nodata"),
        ("optimizer: {name: lion}", "optimizer.name"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_its_key(
    tmp_path: Path, text: str, key: str
) -> None:
    with pytest.raises(UsageError, match=f'"{key}"') as raised:
        read(tmp_path, f"epochs: 1\n{text}\n")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("key", ["images", "labels", "classes", "output"])
def test_a_missing_key_is_refused_by_its_name(tmp_path: Path, key: str) -> None:
    path = tmp_path / "run.yaml"
    lines = [line for line in LEAST.splitlines() if not line.startswith(key)]
    path.write_text("\n".join([*lines, "steps: 1", ""]))
    with pytest.raises(UsageError, match=key):
        read_run_file(["-c", str(path)])


@pytest.mark.parametrize("text", ["steps: [1", "- steps", "steps: 1\n  epochs: 2"])
def test_broken_yaml_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError) as raised:
        read(tmp_path, text)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(UsageError, match=r"nowhere\.yaml"):
        read_run_file(["-c", "/nowhere.yaml"])


@pytest.mark.parametrize("text", ["mesh:", "tiles: null", "network: 3"])
def test_an_empty_group_is_its_defaults_or_a_usage_error(tmp_path: Path, text: str) -> None:
    try:
        assert read(tmp_path, f"steps: 1\n{text}\n") == a_run()
    except UsageError as error:
        assert text.partition(":")[0] in str(error)  # noqa: PT017


# --- contradictions


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"images": ["a", "c"]}, r"one label file \(images: 2, labels: 1\)"),
        ({"images": [], "labels": []}, r"one label file \(images: 0, labels: 0\)"),
        ({"steps": None}, r"steps or epochs, one of them \(steps: None, epochs: None\)"),
        ({"epochs": 2}, r"steps or epochs, one of them \(steps: 1, epochs: 2\)"),
        ({"steps": -1}, r"steps must be at least 0 \(steps: -1\)"),
        ({"steps": None, "epochs": -3}, r"epochs must be at least 0 \(epochs: -3\)"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1"),
        ({"crop_px": 0}, "crop_px must be at least 1"),
        ({"classes": 1}, "at least two classes"),
        ({"classes": ["sea"]}, "at least two classes"),
        ({"ignore_index": 1}, r"may not be a class \(ignore_index: 1, classes: 0 to 1\)"),
        ({"ignore_index": 0}, r"may not be a class \(ignore_index: 0, classes: 0 to 1\)"),
        ({"vectors": VectorKeys(burn=2)}, r"\(vectors.burn: 2, classes: 0 to 1, ignore_index: 255"),
        ({"class_weights": [1.0]}, "one weight of at least 0 per class"),
        ({"class_weights": [1.0, -0.5]}, "one weight of at least 0 per class"),
        ({"class_weights": [0.0, 0.0]}, "not all 0"),
        ({"class_weights": []}, "one weight of at least 0 per class"),
        ({"tiles": TileKeys(2, 2, 64)}, "a grid or as a size, not both"),
        ({"tiles": TileKeys(rows=2)}, r"rows and columns \(rows: 2, columns: None\)"),
        ({"tiles": TileKeys(columns=3)}, r"rows and columns \(rows: None, columns: 3\)"),
        ({"partitions": 0}, r"partitions must be at least 1 \(partitions: 0\)"),
        ({"micro_batches": 0}, r"micro_batches must be at least 1 \(micro_batches: 0\)"),
        (
            {"partitions": 3, "balance": [3, 4]},
            r"one number of layers per partition \(balance: \[3, 4\], partitions: 3\)",
        ),
        (
            {"partitions": 2, "device": ["cpu"]},
            r"names one per partition \(device: \['cpu'\], partitions: 2\)",
        ),
        ({"balance": []}, r"at least one partition \(balance: \[\]\)"),
        ({"micro_batches": 1025}, r"at most 1024 micro-batches"),
        ({"profile": ProfileKeys("60-40")}, r"first and a last step .*steps: 60-40\); write 40-60"),
        ({"profile": ProfileKeys("0-3")}, r"from 1 on.*\(profile.steps: 0-3\)"),
        ({"profile": ProfileKeys(0)}, r"from 1 on.*\(profile.steps: 0\)"),
        ({"profile": ProfileKeys("-3")}, r"first and a last step .*\(profile.steps: -3\)"),
        ({"profile": ProfileKeys("4-")}, r"first and a last step .*\(profile.steps: 4-\)"),
        ({"profile": ProfileKeys("all")}, r"first and a last step .*\(profile.steps: all\)"),
        ({"profile": ProfileKeys("1-101")}, r"at most 100 together .*\(profile.steps: 1-101\)"),
        (
            {"profile": ProfileKeys("5-9"), "steps": 4},
            r"begin within the run \(profile.steps: 5-9, steps: 4\); choose earlier ones",
        ),
        ({"gradients": GradientKeys(piece_mb=0)}, r"piece_mb must lie between"),
        ({"gradients": GradientKeys(piece_mb=float("nan"))}, r"piece_mb must lie between"),
        ({"swap": True}, r"off, auto or all \(swap: true\); auto swaps no more"),
        ({"swapping": SwappingKeys(device_gib=0)}, r"swapping\.device_gib .* above 0 .*: 0\)"),
        ({"swapping": SwappingKeys(min_mib=-0.5)}, r"min_mib .* from 0 on .*: -0\.5\)"),
        ({"swapping": SwappingKeys(host_gib=-1)}, r"swapping\.host_gib .* above 0 .*: -1\)"),
        ({"focal_gamma": -0.1}, r"focal_gamma must be a number of at least 0 .*: -0\.1\)"),
        ({"focal_gamma": float("inf")}, r"focal_gamma must be a number"),
        ({"optimizer": OptimizerKeys("sgd", nesterov=True)}, r"nesterov is a kind of momentum"),
        (
            {"optimizer": OptimizerKeys("adamw", momentum=0.9, nesterov=True)},
            r"nesterov is a kind .*\(optimizer\.name: adamw, optimizer\.momentum: 0\.9\)",
        ),
        ({"optimizer": OptimizerKeys(clip_norm=0.0)}, r"clip_norm must be a number above 0"),
        ({"optimizer": OptimizerKeys(clip_norm=float("nan"))}, r"clip_norm must be .* nan\)"),
        ({"schedule": ScheduleKeys("poly", power=0)}, r"schedule\.power must be .* above 0"),
        ({"schedule": ScheduleKeys(factor=-1)}, r"schedule\.factor must be .* above 0"),
        ({"schedule": ScheduleKeys(warmup_steps=-1)}, r"warm-up must end before the run"),
        (
            {"schedule": ScheduleKeys(warmup_steps=5), "steps": 5},
            r"\(.*warmup_steps: 5, steps: 5\)",
        ),
        ({"schedule": ScheduleKeys(min_lr=0.1)}, r"min_lr lies between .*lr: 0\.001\)"),
        ({"schedule": ScheduleKeys(min_lr=-0.1)}, r"min_lr lies between"),
        ({"schedule": ScheduleKeys("step")}, r"milestones belong to .*None\); set some"),
        ({"schedule": ScheduleKeys("poly", milestones=[3])}, r"milestones belong .* name: step"),
        ({"schedule": ScheduleKeys("step", milestones=[])}, r"steps from 1 on, each later"),
        ({"schedule": ScheduleKeys("step", milestones=[0, 4])}, r"steps from 1 on, each later"),
        ({"schedule": ScheduleKeys("step", milestones=[4, 4])}, r"each later .*\[4, 4\]\)"),
        ({"augment": AugmentKeys(brightness=-0.1)}, r"augment\.brightness must be .* least 0"),
        ({"augment": AugmentKeys(noise=float("inf"))}, r"augment\.noise must be .* least 0"),
        ({"augment": AugmentKeys(contrast=1.1)}, r"augment\.contrast must be .* between 0 and 1"),
    ],
    ids=str,
)
def test_a_contradiction_has_its_sentence(change: dict[str, Any], said: str) -> None:
    with pytest.raises(TilenetError, match=said) as raised:
        a_run(**change)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"steps": None, "epochs": 0},
        {"ignore_index": 2},
        {"ignore_index": -1},
        {"class_weights": [0.0, 1e-9]},
        {"class_weights": "auto", "loss": "focal", "focal_gamma": 0.0},
        {"schedule": ScheduleKeys("step", milestones=[1], min_lr=0.001, warmup_steps=0)},
        {"schedule": ScheduleKeys("poly", warmup_steps=1), "steps": 2},
        {"schedule": ScheduleKeys(warmup_steps=9), "steps": 0},
        {"augment": AugmentKeys(contrast=1.0, brightness=5.0)},
        {"seed": 0, "batch_size": 1, "crop_px": 1, "checkpoint_every": 1},
        {"tiles": TileKeys(size_px=64)},
        {"tiles": TileKeys(1, 1)},
        {"partitions": 1, "micro_batches": 1, "checkpointing": "never", "swap": "off"},
        {"profile": ProfileKeys(1)},
        {"profile": ProfileKeys("1-100")},
        {"profile": ProfileKeys("1000-1099"), "steps": None, "epochs": 1},
    ],
    ids=str,
)
def test_the_least_values_are_legal(change: dict[str, Any]) -> None:
    run = a_run(**change)
    assert all(getattr(run, name) == value for name, value in change.items())


def test_contradictions_of_a_file_are_said_in_the_same_words(tmp_path: Path) -> None:
    with pytest.raises(TilenetError, match="steps or epochs"):
        read(tmp_path, "steps: 1\nepochs: 2\n")


@pytest.mark.parametrize(
    "keys", [{"lr": -1.0}, {"lr": float("nan")}, {"momentum": -1.0}, {"weight_decay": -1.0}]
)
def test_an_optimizer_that_torch_refuses_is_refused(keys: dict[str, float]) -> None:
    with pytest.raises(TilenetError, match=next(iter(keys))):
        a_run(optimizer=OptimizerKeys("sgd", **keys))


def test_the_recipe_is_set_on_the_command_line(tmp_path: Path) -> None:
    options = ["--class_weights", "auto", "--schedule.name=cosine", "--augment.noise", "0.5"]
    found = read(tmp_path, "steps: 9\n", *options, "--optimizer.clip_norm", "3")
    assert found.class_weights == "auto"
    assert (found.schedule, found.augment) == (ScheduleKeys("cosine"), AugmentKeys(noise=0.5))
    assert found.optimizer == OptimizerKeys(clip_norm=3.0)
    with pytest.raises(UsageError, match="class_weights"):
        read(tmp_path, "steps: 9\n", "--class_weights", "some")


@pytest.mark.parametrize(
    ("loss", "terms"),
    [("ce", ("ce",)), ("dice", ("dice",)), ("focal", ("focal",)), ("ce+dice", ("ce", "dice"))],
)
def test_a_loss_is_a_sum_of_terms(loss: Any, terms: tuple[str, ...]) -> None:
    """Of whole words: dice ends in ce."""
    assert a_run(loss=loss).loss_terms == terms


def test_class_weights_are_numbers() -> None:
    with pytest.raises(TilenetError, match="class_weights"):
        a_run(class_weights=[float("nan"), 1.0])


# --- the network


def test_keys_of_the_network_change_the_presets_or_the_defaults() -> None:
    assert network_options(NetworkKeys(), 3, 5) == UNetOptions(bands=3, classes=5)
    found = network_options(NetworkKeys(preset="large", base=8, dropout=0.0, bias=False), 3, 5)
    assert found == replace(PRESETS["large"], base=8, dropout=0.0, bias=False, bands=3, classes=5)
    given = NetworkKeys(None, 2, 3, 6, 5, "valid", "bilinear", "group", "tile", 3, 0.5, True)
    wanted = UNetOptions(2, 3, 6, 4, 7, 5, "valid", "bilinear", "group", "tile", 3, 0.5, True)
    assert network_options(given, 4, 7) == wanted


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
    assert paper_epsilon_px(keys, network_options(keys, 4, 2)) == epsilon


def test_an_impossible_network_is_refused() -> None:
    with pytest.raises(TilenetError, match="nearest: 4"):
        network_options(NetworkKeys(base=5), 4, 2)
