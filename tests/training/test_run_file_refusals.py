"""Run files: unknown keys, values of the wrong type or range, and contradictions, in sentences."""

import re
from pathlib import Path
from typing import Any

import pytest
from test_run_file import LEAST, a_run, read

from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.errors import TilenetError, UsageError
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.planning.memory.map_limits import check_weight_bytes
from tilenet.training.config.keys import (
    AugmentKeys,
    CheckpointKeys,
    NetworkKeys,
    OptimizerKeys,
    ProfileKeys,
    ScheduleKeys,
    TileKeys,
)
from tilenet.training.config.read import read_run_file, run_file_text
from tilenet.training.config.validation_keys import ValidationKeys
from tilenet.training.setup.architecture import Architecture

UNKNOWN = r"unknown key {}; the nearest known key is {}\)$"

# what stands in the file below the least of a run, options, a part of the sentence
TEXTS = [
    ("stpes: 3", "", UNKNOWN.format("stpes", "steps")),
    ("netwrk: {preset: small}", "", UNKNOWN.format(r"netwrk\.preset", r"network\.preset")),
    ("network: {pooling: 3}", "", UNKNOWN.format(r"network\.pooling", r"network\.poolings")),
    ("mesh: {cols: 3}", "", UNKNOWN.format(r"mesh\.cols", r"mesh\.columns")),
    ("", "--stpes 3", UNKNOWN.format("stpes", "steps")),
    ("", "--stpes=3", UNKNOWN.format("stpes", "steps")),
    ("", "--network.norm_scop tile", UNKNOWN.format(".*norm_scop", ".*norm_scope")),
    ("steps: many", "", r'"steps" takes a whole number \(steps: many\); correct it$'),
    ("steps: 2.5", "", r'"steps" takes a whole number \(steps: 2\.5\)'),
    ("halo: wide", "", '"halo" takes exact, epsilon or a whole number .halo: wide'),
    ("bands: [no, 1]", "", "bands: .False, 1.*; words such as yes, no and on stand in"),
    ("bands: red", "", '"bands" takes a list of names and numbers'),
    ("bands: *.red", "", "a text that begins with . or & stands in quotes .*alias"),
    ("optimizer: {lr: 0,001}", "", "numbers have a decimal point.*, got: 1"),
    ("augment: flips", "", "a group has keys under it, or the path"),
    (
        "vectors: {classes: {a: b}}",
        "",
        "takes values and a whole number or null for each .*: {'a': 'b'}",
    ),
    ("halo: 9.5", "", '"halo"'),
    ("bands: {red: 1}", "", '"bands"'),
    ("precision: float17", "", '"precision"'),
    ("network: {preset: tiny}", "", '"network.preset"'),
    ("network: {norm: layer}", "", '"network.norm"'),
    ("loss: hinge", "", '"loss"'),
    ("class_weights: some", "", '"class_weights"'),
    ("nodata: black", "", '"nodata"'),
    ("optimizer: {name: lion}", "", '"optimizer.name"'),
    ("steps: [1", "", "Problems parsing config.* line 6"),
    ("- steps", "", "Problems parsing config.* line 6"),
    ("steps: 1\n  epochs: 2", "", "Problems parsing config.* line 7"),
    ("tiles: null", "", r"tiles is a group of keys \(tiles: None\)"),
    ("network: 3", "", r"network is a group of keys \(network: 3\)"),
    ("network: /nowhere.yaml", "", r'"network": Unable to load config ./nowhere\.yaml'),
    ("config: /nowhere.yaml", "", r"File does not exist: ./nowhere\.yaml"),
    ("seed: 3\nread_ahead: 1\nseed: 4", "", r"stands once .* \(seed in lines 6 and 8\); delete"),
    ("vectors: {field: f, classes: {1: 0, 1: 1}}", "", r"\(1 in lines 6 and 6\); delete one"),
]


@pytest.mark.parametrize(("text", "options", "said"), TEXTS)
def test_what_a_file_or_an_option_may_not_say_is_refused_in_one_line(
    tmp_path: Path, text: str, options: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        read(tmp_path, f"epochs: 1\n{text}\n", *options.split())
    assert "\n" not in str(raised.value)


def test_groups_may_have_the_same_keys(tmp_path: Path) -> None:
    run = read(tmp_path, "steps: 1\noptimizer: {name: sgd}\nschedule: {name: poly}\n")
    assert (run.optimizer.name, run.schedule.name) == ("sgd", "poly")


def test_a_number_and_its_text_are_one_value_of_a_field(tmp_path: Path) -> None:
    with pytest.raises(TilenetError, match=r"each value once, .* \(1: 0 and 1\)"):
        read(tmp_path, 'steps: 1\nvectors: {field: f, classes: {1: 0, "1": 1}}\n')


@pytest.mark.parametrize("key", ["images", "classes", "output"])
def test_a_missing_key_is_refused_by_its_name(tmp_path: Path, key: str) -> None:
    path = tmp_path / "run.yaml"
    lines = [line for line in LEAST.splitlines() if not line.startswith(key)]
    path.write_text("\n".join([*lines, "steps: 1", ""]))
    with pytest.raises(UsageError, match=key):
        read_run_file(["-c", str(path)])


def test_labels_may_be_missing_beside_a_list_of_images_only(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    text = "images: {}\nclasses: 2\noutput: out\nsteps: 1\n"
    for name in ("list.csv", "list.GeoJSON", "list.gpkg"):
        path.write_text(text.format(name))
        assert read_run_file(["-c", str(path)])[0].label_paths == ()
    path.write_text(text.format("a.tif"))
    with pytest.raises(TilenetError, match=r"one label file \(images: 1, labels: 0\)"):
        read_run_file(["-c", str(path)])


# --- contradictions


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"images": ["a", "c"]}, r"one label file \(images: 2, labels: 1\)"),
        ({"images": [], "labels": []}, r"one label file \(images: 0, labels: 0\)"),
        ({"images": "a.csv"}, r"stands alone.*\(images: a\.csv, labels: b\.tif\)"),
        ({"images": ["a.csv", "b.tif"], "labels": None}, r"stands alone.* labels: none\)"),
        ({"validation": ValidationKeys("v.json", "w.tif")}, r"ion\.images: v\.json, .*: w\.tif\)"),
        ({"steps": None}, r"steps or epochs, one of them \(steps: None, epochs: None\)"),
        ({"epochs": 2}, r"steps or epochs, one of them \(steps: 1, epochs: 2\)"),
        ({"classes": 1}, "at least two classes"),
        ({"classes": ["sea"]}, "at least two classes"),
        ({"classes": ["sea", "a b", "ice", "a b"]}, r"name of its own.*'a b' is there 2 times"),
        ({"seed": None}, r"has a value \(seed: null"),
        ({"optimizer": OptimizerKeys(lr=None)}, r"has a value \(optimizer\.lr: null"),
        ({"ignore_index": 1}, r"may not be a class \(ignore_index: 1, classes: 0 to 1\)"),
        ({"ignore_index": 0}, r"may not be a class \(ignore_index: 0, classes: 0 to 1\)"),
        ({"vectors": VectorKeys(burn=2)}, r"\(vectors.burn: 2, classes: 0 to 1, ignore_index: 255"),
        ({"vectors": VectorKeys(classes={"a": 1})}, r"vectors.classes \(--classes\) maps the val"),
        ({"class_weights": [1.0]}, "one weight of at least 0 per class"),
        ({"class_weights": [1.0, -0.5]}, "one weight of at least 0 per class"),
        ({"class_weights": [0.0, 0.0]}, "not all 0"),
        ({"class_weights": [0.0, 1e-38]}, r"ratios of .* at least 1e-37\); multiply"),
        (
            {"class_weights": [1e-6, 9e-6], "precision": "float16"},
            r"float16 rounds small ones to 0 .* at least 1e-05\)",
        ),
        ({"class_weights": [float("nan"), 1.0]}, "class_weights"),
        ({"class_weights": []}, "one weight of at least 0 per class"),
        ({"tiles": TileKeys(2, 2, 64)}, r"or as a size \(rows: 2, columns: 2, size_px: 64\)"),
        ({"tiles": TileKeys(rows=2)}, r"rows and columns.*\(rows: 2, columns: None"),
        ({"tiles": TileKeys(columns=3)}, r"rows and columns.*\(rows: None, columns: 3"),
        ({"partitions": 2, "device": ["cpu"]}, r"one per .*device: \['cpu'\], partitions: 2\)"),
        ({"profile": ProfileKeys("60-40")}, r"first and a last step .*steps: 60-40\); write 40-60"),
        ({"profile": ProfileKeys("0-3")}, r"from 1 on.*\(profile.steps: 0-3\)"),
        ({"profile": ProfileKeys(0)}, r"from 1 on.*\(profile.steps: 0\)"),
        ({"profile": ProfileKeys("-3")}, r"first and a last step .*\(profile.steps: -3\)"),
        ({"profile": ProfileKeys("4-")}, r"first and a last step .*\(profile.steps: 4-\)"),
        ({"profile": ProfileKeys("all")}, r"first and a last step .*\(profile.steps: all\)"),
        ({"profile": ProfileKeys("1-101")}, r"at most 100 together .*\(profile.steps: 1-101\)"),
        ({"profile": ProfileKeys("5-9"), "steps": 4}, r"begin within .* 5-9, steps: 4\); choose"),
        ({"swap": True}, r"off, auto or all \(swap: true\); auto swaps no more"),
        ({"schedule": ScheduleKeys(warmup_steps=5), "steps": 5}, r"\(.*warmup_steps: 5, steps: 5"),
        ({"schedule": ScheduleKeys("poly", min_lr=0.1)}, r"min_lr lies between .*lr: 0\.001\)"),
        ({"schedule": ScheduleKeys("step")}, r"has milestones.*name: step, .*None\)"),
        ({"schedule": ScheduleKeys("step", milestones=[])}, r"steps from 1 on, each later"),
        ({"schedule": ScheduleKeys("step", milestones=[0, 4])}, r"steps from 1 on, each later"),
        ({"schedule": ScheduleKeys("step", milestones=[4, 4])}, r"each later .*\[4, 4\]\)"),
    ],
    ids=str,
)
def test_a_contradiction_has_its_sentence(change: dict[str, Any], said: str) -> None:
    with pytest.raises(TilenetError, match=said) as raised:
        a_run(**change)
    assert "\n" not in str(raised.value)


# Keys that others do not have read, what they need, and that other's value.
UNREAD = [
    ("optimizer.momentum: 0.9", "optimizer.name: sgd", "adamw"),
    ("optimizer.nesterov: True", "optimizer.name: sgd", "adamw"),
    ("optimizer.nesterov: True", "optimizer.momentum", "0.0", "optimizer.name: sgd"),
    ("schedule.power: 3.0", "schedule.name: poly", "constant"),
    ("schedule.power: 3.0", "schedule.name: poly", "cosine", "schedule.name: cosine"),
    ("schedule.milestones: [3]", "schedule.name: step", "poly", "schedule.name: poly"),
    ("schedule.factor: 0.5", "schedule.name: step", "constant"),
    ("schedule.min_lr: 0.0001", "schedule.name: poly or cosine or step", "constant"),
    ("unit: m", "task: regression", "classification"),
    ("focal_gamma: 3.0", "loss: focal", "None"),
    ("focal_gamma: 0.0", "loss: focal", "ce+dice", "loss: ce+dice"),
    ("huber_delta: 3.0", "loss: huber", "focal", "loss: focal"),
    ("network.groups: 4", "network.norm: group", "none"),
    ("network.groups: 4", "network.norm: group", "instance", "network.preset: small"),
    ("network.norm_scope: tile", "network.norm: batch or group or instance", "none"),
    ("oversample: 0.5", "crop_px", "None"),
    ("validation.block_px: 64", "validation.share", "0.0"),
    ("swapping.min_mib: 0.0", "swap: auto or all", "off"),
    ("swapping.host_gib: 2.0", "swap: auto or all", "off"),
    ("swapping.folder: /local", "swap: auto or all", "off"),
]


@pytest.mark.parametrize("keys", UNREAD, ids=str)
def test_a_key_that_is_not_read_is_refused(tmp_path: Path, keys: tuple[str, ...]) -> None:
    wrong, needed, value, *others = keys
    name, other = wrong.partition(":")[0], needed.partition(":")[0]
    options = ["--" + key.replace(": ", "=", 1) for key in (wrong, *others)]
    said = f"{name} is read only with {needed} ({wrong}, {other}: {value}); set {needed}, or leave"
    with pytest.raises(TilenetError, match=re.escape(said)):
        read(tmp_path, "steps: 9", *options)


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: {name: sgd, momentum: 0.9, nesterov: true}",
        "optimizer: {momentum: 0.0, nesterov: false}",
        "schedule: {name: poly, power: 3.0, min_lr: 1e-4}",
        "schedule: {power: 0.9, factor: 0.1, min_lr: 0.0, milestones: null}",
        "network: {preset: small, norm_scope: tile, groups: 8}",
        "network: {norm: none, norm_scope: image, groups: 8}",
        "network: {preset: small, norm: group, groups: 4}",
        "swap: off\nswapping: {min_mib: 1.0, device_gib: 2.0}",
        "swap: auto\nswapping: {min_mib: 0.0, host_gib: 2.0, folder: /local}",
        "validation: {share: 0.0, block_px: 512}",
    ],
)
def test_a_key_that_is_read_or_has_its_default_is_legal(tmp_path: Path, text: str) -> None:
    run = read(tmp_path, f"steps: 9\n{text}\n")
    path = tmp_path / "kept.yaml"
    path.write_text(run_file_text(run))
    assert read_run_file(["-c", str(path)])[0] == run


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
        {"checkpoints": CheckpointKeys(keep=1)},
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


OUT_OF_RANGE = {
    "from 0 on": [
        "steps: -1",
        "read_ahead: -1",
        "hang_seconds: inf",
        "focal_gamma: -0.1",
        "optimizer.lr: -1.0",
        "optimizer.lr: nan",
        "optimizer.momentum: -1.0",
        "optimizer.weight_decay: inf",
        "schedule.warmup_steps: -1",
        "schedule.min_lr: -0.1",
        "augment.brightness: -0.1",
        "augment.noise: inf",
    ],
    "from 0 to below 2⁶³": ["seed: -1", "seed: 99999999999999999999"],
    "from 1 on": [
        "checkpoint_every: 0",
        "crop_px: 0",
        "partitions: 0",
        "checkpoints.keep: 0",
        "validation.block_px: 0",
        "validation.every: 0",
        "validation.batch_size: 0",
        "micro_batches: 0",
        "batch_size: 0",
    ],
    "above 0": ["optimizer.clip_norm: 0.0", "schedule.factor: -1.0", "gradients.piece_mb: nan"],
    "from 0 to 1": ["oversample: 1.1", "augment.contrast: 1.1"],
    "from 0 to below 1": ["validation.share: 1.0"],
}


@pytest.mark.parametrize("rule", OUT_OF_RANGE)
def test_a_number_out_of_its_range_is_refused_with_it(tmp_path: Path, rule: str) -> None:
    for wrong in OUT_OF_RANGE[rule]:
        key, _, value = wrong.partition(": ")
        length = "epochs: 1\n" if key != "steps" else ""
        said = f"{key} is a finite number {rule} ({wrong}); write such a number"
        with pytest.raises(TilenetError, match=re.escape(said)):
            read(tmp_path, length, f"--{key}={'.' * value.isalpha()}{value}")


def test_networks_larger_than_any_memory_are_refused() -> None:
    with pytest.raises(TilenetError, match="at most 100 convolutions"):
        UNetOptions(convolutions=10**9)
    with pytest.raises(TilenetError, match="weights alone"):
        check_weight_bytes(unet_layers(UNetOptions(poolings=1, base=10**6)))
    with pytest.raises(TilenetError, match="nearest: 4"):
        Architecture.of(NetworkKeys(base=5), 4, 2, 0)
