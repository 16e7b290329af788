"""What Python programs call gives what the commands give, and results say what they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from mpi4py import MPI
from scenes import KEYS, Net
from torch import nn

import tilenet
from tilenet.__main__ import main
from tilenet.cli.predict import main as predict_command


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(5)
    return Net()


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
def test_a_run_is_that_of_the_command(scene: Path, mode: str) -> None:
    first = MPI.COMM_WORLD.rank == 0
    steps: list[Any] = []
    scores: list[Any] = []
    ours = {"network": {"poolings": 2, "base": 8}, "halo_mode": mode}
    run = tilenet.train(
        output=scene / "a", on_step=steps.append, on_validation=scores.append, **KEYS, **ours
    )
    if first:  # which alone reads it
        Path("run.yaml").write_text(json.dumps({**KEYS, **ours, "output": "b"}))
    assert main(["train", "-c", "run.yaml"]) == 0
    other = tilenet.Run("b")
    assert run.finished
    assert [row["loss"] for row in steps] == list(run.history["loss"] if first else [])
    assert [row["mean_iou"] for row in scores] == list(run.validation["mean_iou"] if first else [])
    assert list(run.validation["mean_iou"]) == list(other.validation["mean_iou"])
    assert list(run.history["loss"]) == list(other.history["loss"])
    mine, theirs = run.weights(), other.weights()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert repr(run).startswith("<Run folder: ")
    assert "steps: 3, loss: " in repr(run)


class Normed(Net):
    """With a norm behind its head."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.head = nn.Sequential(self.head, norm)


@pytest.mark.ranks(1, 2)
def test_norms_that_do_nothing_are_said(scene: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained = Normed(nn.BatchNorm2d(3))
    trained(torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(1)))
    plain, init = Normed(nn.BatchNorm2d(3)), {"init": scene / "first"}
    first = MPI.COMM_WORLD.rank == 0
    cases: list[tuple[str, nn.Module, dict[str, Any], bool]] = [
        ("first", plain, {}, True),
        ("first", plain, {"steps": 2, "resume": True}, False),
        ("init", plain, init, False),
        ("step", plain, {"network": {"batch_norm": "step"}}, False),
        ("trained", trained, {}, False),
        ("group", Normed(nn.GroupNorm(1, 3)), {}, False),
        ("none", Net(), {}, False),
    ]
    for name, module, keys, said in cases:
        tilenet.train(module, output=scene / name, **{**KEYS, "steps": 1, **keys})
        text = capfd.readouterr().err
        note = "running statistics of all batch norms (1) are as made, with mean 0 and variance 1"
        assert (note in text) == (said and first), name


def test_a_module_is_trained_as_it_is_given_and_stays_so(scene: Path, net: Net) -> None:
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    run = tilenet.train(net, output="run", **{**KEYS, "steps": 1, "optimizer": {"name": "sgd"}})
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())
    trained = Net()
    trained.load_state_dict(run.weights())
    moved = [bool((tensor != before[name]).any()) for name, tensor in trained.state_dict().items()]
    assert all(moved)
    # The first loss is that of the weights that were given.
    with rasterio.open("i.tif") as image, rasterio.open("l.tif") as labels:
        pixels, truth = image.read().astype(np.float64), labels.read(1).astype(np.int64)
    folder = Path("run/last/network.json")
    said = json.loads(folder.read_text())["statistics"]
    mean, std = (np.array(said[name])[:, None, None] for name in ("mean", "std"))
    held = np.asarray(run.history["weight_sum"])[0]
    assert 0 < held < truth.size
    with torch.no_grad():
        logits = Net.forward(net.double(), torch.from_numpy((pixels - mean) / std)[None])
    net.float()
    mean = nn.functional.cross_entropy(logits, torch.from_numpy(truth)[None], ignore_index=255)
    assert abs(float(mean) - run.history["loss"][0]) < 0.05  # blocks are held out


def test_maps_of_files_arrays_and_modules_are_the_same(scene: Path, net: Net) -> None:
    tilenet.train(net, output="run", **{**KEYS, "steps": 1})
    made = tilenet.predict("run", "i.tif", "a.tif", tile_px=64)
    assert predict_command(["run", "i.tif", "b.tif", "--tile", "64"]) == 0
    with rasterio.open("a.tif") as a, rasterio.open("b.tif") as b, rasterio.open("i.tif") as i:
        classes, pixels = a.read(1), i.read()
        assert (classes == b.read(1)).all()
    assert len(set(classes.ravel())) == 3
    assert repr(made) == "<Map path: a.tif, size: 203 × 317 px, method: tiles, halo: 4 px>"
    assert (tilenet.predict(tilenet.Run("run"), pixels) == classes).all()
    pixels = pixels[:, :-1, :-1]  # the module itself takes no other sizes exactly
    whole = tilenet.predict(net, pixels, output="logits", mean=[7, 8], std=[900.0, 11])
    with torch.no_grad():
        given = (pixels.astype(np.float32) - np.array([[[7]], [[8]]])) / np.array([[[900]], [[11]]])
        wanted = net(torch.from_numpy(given.astype(np.float32))[None])[0].numpy()
    assert np.abs(whole - wanted).max() <= 2e-5 * np.abs(wanted).max()
    part = tilenet.predict(
        net,
        pixels,
        output="logits",
        mean=np.array([7, 8]),
        std=[900.0, 11],
        window=[10, 21, 30, 40],
    )
    assert (part == whole[:, 10:40, 21:61]).all()


def test_pixels_without_data_of_an_array_have_none_in_the_map(net: Net) -> None:
    pixels = np.random.default_rng(1).normal(size=(2, 40, 60)).astype(np.float32)
    pixels[1, 7, 9] = np.nan
    found = tilenet.predict(net, pixels, output="probabilities")
    assert np.argwhere(np.isnan(found[0])).tolist() == [[7, 9]]
    assert np.allclose(np.nansum(found, axis=0), 1 - np.isnan(found[0]), atol=1e-6)


def test_scores_are_those_of_the_command(scene: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rasterio.open("l.tif") as labels:
        truth, profile = labels.read(), labels.profile
    truth[:, ::3] = 1
    with rasterio.open("map.tif", "w", **profile) as file:
        file.write(truth)
    found = tilenet.evaluate("map.tif", Path("l.tif"))
    assert main(["evaluate", "map.tif", "l.tif", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["mean_iou"] == found.mean_iou
    assert said["confusion"] == found.confusion
    assert main(["evaluate", "map.tif", "l.tif"]) == 0
    assert capsys.readouterr().out == f"{found}\n"
    assert repr(found).startswith("<Scores mean_iou: 0.")


def test_halos_of_all_that_names_a_network(net: Net) -> None:
    assert tilenet.halo(net).px == tilenet.halo(tilenet.adopt(net, 2)).px == 4
    assert tilenet.halo("unet-small").px == tilenet.halo({"preset": "small"}).halo_px == 192
    assert tilenet.halo(net, bands=2).alignment_px == 2


def test_a_plan_is_that_of_the_command(scene: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tilenet.plan("unet-small", images="i.tif", classes=5, machine="summit", nodes=2)
    asked = "--preset small --image 203x317 --bands 2 --classes 5 --machine summit --nodes 2"
    assert main(["plan", *asked.split()]) == 0
    assert capsys.readouterr().out == f"{found}\n"
    assert repr(found).startswith("<Plans ")
    found.save("plan.json")
    assert json.loads(Path("plan.json").read_text())["run"] == found.best.run_keys()


def test_a_plan_with_a_balance_and_a_grid_in_lists(
    scene: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same: dict[str, Any] = {"net": {"poolings": 1, "base": 4}, "image": [90, 71]}
    found = tilenet.plan(**same, machine="summit", balance=[8, 9], grid=[2, 3])
    asked = "--poolings 1 --base 4 --classes 2 --image 90x71 --machine summit"
    assert main(["plan", *asked.split(), "--balance", "8,9", "--grid", "2x3"]) == 0
    assert capsys.readouterr().out == f"{found}\n"
    assert found.best.layout.partitions == 2


def test_none_replaces_a_key_of_the_plan(scene: Path) -> None:
    asked = "--poolings 1 --base 4 --bands 2 --classes 3 --image 203x317 --machine local"
    more = "--balance 8,9 --devices-per-node 2 --json -o balance.json"
    assert main(["plan", *asked.split(), *more.split()]) == 0
    net = {"poolings": 1, "base": 4}
    keys = KEYS | {"plan": "balance.json", "network": net, "steps": 0, "crop_px": None}
    tilenet.train(output="two", batch_size=None, **keys)
    assert "\nbalance: [8, 9]\n" in Path("two/run.yaml").read_text()
    tilenet.train(output="three", partitions=3, balance=None, **keys)
    kept = Path("three/run.yaml").read_text()
    assert "\npartitions: 3\n" in kept
    assert "\nbalance:" not in kept


def test_a_plan_of_a_module_by_all_its_names(
    net: Net, scene: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"machine": "summit", "nodes": 2, "batch_size": 3}
    found = tilenet.plan(net, images="i.tif", **asked)
    name = f"{Net.__module__}:{Net.__qualname__}"
    for same in (tilenet.adopt(net, 2), name, {"module": name, "batch_norm": "frozen"}):
        assert str(tilenet.plan(same, images="i.tif", **asked)) == str(found)
    more = "--bands 2 --image 203x317 --machine summit --nodes 2 --batch-size 3"
    assert main(["plan", "--network", name, *more.split()]) == 0
    assert capsys.readouterr().out == f"{found}\n"
    found.save("plan.json")
    assert json.loads(Path("plan.json").read_text())["asked"]["options"]["name"] == "Net"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda net: tilenet.train(net, stops=3), "unknown key stops; the nearest .* is steps"),
        (lambda net: tilenet.train("unet-tiny"), "unet-small, unet-medium-1.*net: unet-tiny"),
        (lambda net: tilenet.train(net, **KEYS, loss=len), "numbers, texts, lists and dictionar"),
        (lambda net: tilenet.predict(net, np.ones((2, 9, 9)), outputs=1), "unknown: outputs"),
        (lambda net: tilenet.predict(net, np.ones((9, 9))), r"array \(bands, H, W\)"),
        (lambda net: tilenet.predict(net, np.ones((2, 9, 9)), resume=True), "leave resume out"),
        (lambda net: tilenet.predict(net, np.ones((2, 9, 9)), std=[1, 0]), "std above 0"),
        (lambda net: tilenet.predict("run", np.ones((2, 9, 9)), std=[1, 1]), "leave them out"),
        (lambda net: tilenet.predict("nowhere", np.ones((2, 9, 9))), "nowhere is neither"),
        (
            lambda net: tilenet.evaluate("a", "b", vectors={"fields": "x"}),
            r"nearest .* is vectors\.field\)",
        ),
        (
            lambda net: tilenet.evaluate("a", "b", vectors={"background": "none"}),
            r'"vectors\.background" takes a whole number or ignore .*: none\)',
        ),
        (
            lambda net: tilenet.evaluate("a", "b", vectors={"all_touched": "maybe"}),
            r'"vectors\.all_touched" takes true or false .*: maybe\)',
        ),
        (
            lambda net: tilenet.evaluate("a", "b", vectors={"classes": {"lake": 2}}),
            r"maps the values of a field .*'lake': 2}, vectors.field: None\)",
        ),
        (lambda net: tilenet.evaluate("a", "b", vectors={"priority": [1, 1]}), "each class once"),
        (lambda net: tilenet.plan(net, image=(9, 9), classes=9), "its own classes .classes: 9"),
        (
            lambda net: tilenet.plan(tilenet.adopt(net, 2), bands=3, image=(9, 9)),
            "own bands .bands: 3",
        ),
        (
            lambda net: tilenet.plan("torch.nn:ReLU", image=(9, 9)),
            "first convolution.*pass bands=N",
        ),
        (lambda net: tilenet.plan("unet-small", image=(9, 9), node=1), "nearest .* is nodes"),
        (lambda net: tilenet.plan("unet-small"), "give image or images"),
        (lambda net: tilenet.halo(nn.ReLU()), "pass bands=N"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(net: Net, call: Any, sentence: str) -> None:
    with pytest.raises(tilenet.TilenetError, match=sentence) as error:
        call(net)
    assert "\n" not in str(error.value)


def test_names_at_the_top() -> None:
    assert {"train", "predict", "evaluate", "halo", "plan", "swapping"} <= set(dir(tilenet))
    for name in tilenet.__all__:
        assert getattr(tilenet, name)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = tilenet.trian


def test_four_bands_of_bytes_are_read_alike_from_a_file_and_from_an_array(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = np.random.default_rng(3).integers(0, 3, (4, 20, 24)).astype(np.uint8)
    bands = {"count": 4, "height": 20, "width": 24, "dtype": "uint8"}
    path = tmp_path / "image.tif"
    with rasterio.open(path, "w", driver="GTiff", photometric="MINISBLACK", **bands) as file:
        file.write(values)
    net = torch.nn.Conv2d(4, 2, 3, padding=1)
    found = [tilenet.predict(net, image, output="logits", prove=False) for image in (path, values)]
    assert np.isfinite(found[1]).all()
    assert np.array_equal(*found)


def test_classes_of_one_name_are_refused() -> None:
    net, image = torch.nn.Conv2d(1, 2, 1), np.zeros((1, 9, 9), np.float32)
    with pytest.raises(tilenet.TilenetError, match="each class has a name of its own"):
        tilenet.predict(net, image, classes=["x", "x"])


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "float32", "float64"])
def test_masked_pixels_have_no_data(dtype: str) -> None:
    """As rasterio reads with masked=True."""
    torch.manual_seed(0)
    rng = np.random.default_rng(4)
    values, hidden = rng.integers(0, 9, (2, 20, 24)).astype(dtype), rng.random((20, 24)) < 0.3
    net, mask = nn.Conv2d(2, 2, 3, padding=1), np.broadcast_to(hidden, values.shape)
    found = tilenet.predict(net, np.ma.array(values, mask=mask), prove=False)
    bare = np.where(hidden, np.nan, values.astype(np.float64))
    assert np.array_equal(found == 255, hidden)
    assert np.array_equal(found, tilenet.predict(net, bare, prove=False))


@pytest.mark.parametrize(
    "wrong",
    [{"output": "logit"}, {"output": "Classes"}, {"precision": "double"}, {"precision": "half"}],
)
def test_words_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    net, image = nn.Conv2d(1, 2, 1), np.zeros((1, 9, 9), np.float32)
    with pytest.raises(tilenet.TilenetError, match=f"{next(iter(wrong))} is one of"):
        tilenet.predict(net, image, **wrong)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("hook", ["on_step", "on_validation"])
def test_what_a_callback_raises_ends_the_run_on_all_ranks(scene: Path, hook: str) -> None:
    """In a loop of its own a program may stop early so."""
    comm, said = MPI.COMM_WORLD, []

    def enough(row: Any) -> None:
        said.append(row["step"])
        raise StopIteration("enough")

    kinds = StopIteration if comm.rank == 0 else tilenet.TilenetError
    keys = {**KEYS, "steps": 6, "validation": {"share": 0.3, "block_px": 16, "every": 2}}
    with pytest.raises(kinds, match="enough"):
        tilenet.train(Net(), output=scene / "a", **{hook: enough}, **keys)
    assert len(said) == (comm.rank == 0)
    if comm.size > 1:
        assert (scene / "a" / "last").is_symlink()


def test_training_leaves_a_programs_random_numbers_alone(scene: Path) -> None:
    torch.manual_seed(4)
    wanted = torch.rand(3)
    torch.manual_seed(4)
    tilenet.train(output=scene / "a", network={"poolings": 2, "base": 4}, **KEYS)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_a_module_maps_in_the_precision_that_is_asked_for(
    kind: torch.dtype, precision: str
) -> None:
    torch.manual_seed(0)
    net, rng = nn.Conv2d(2, 2, 3, padding=1).to(kind), np.random.default_rng(5)
    image = rng.normal(0, 1, (2, 20, 24))
    found = tilenet.predict(net, image, output="logits", precision=precision, prove=False)
    with torch.no_grad():
        wanted = net.double()(torch.from_numpy(image)[None])[0].numpy()
    assert found.dtype == (np.float64 if precision == "float64" else np.float32)
    rounding = {"float32": 1e-6, "float64": 1e-12, "bfloat16": 3e-2}[precision]
    assert np.abs(found - wanted).max() < rounding * np.abs(wanted).max()
