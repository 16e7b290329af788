"""A checker that knows nothing of tilenet finds its maps and steps right on 1, 2 and 4 ranks.

And it finds those wrong that were made wrong on purpose: otherwise it would prove nothing.
"""

import ast
import json
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import rasterio
from check import main as check_from_outside
from rebuild import read_safetensors

Tilenet = Callable[..., None]
HEIGHT, WIDTH = 157, 211  # no multiple of any alignment
SGD = ("--optimizer.name", "sgd", "--optimizer.lr", "1")
FINE = ("--tiles.rows", "3", "--tiles.columns", "4")  # uneven shares for 2 and 4 ranks

NETWORKS = {
    "same-nearest": "--network.poolings 2",
    # One convolution a level keeps the halo, 32 px, well below the image's size.
    "same-bilinear": "--network.poolings 3 --network.convolutions 1 --network.upsampling bilinear",
    "valid-nearest": "--network.poolings 2 --network.padding valid",
}


@dataclass(frozen=True)
class Run:
    """A folder with an image, its labels, and the first weights of one network."""

    folder: Path
    options: tuple[str, ...]  # of `tilenet train`, tiles and steps aside
    tilenet: Tilenet  # runs its commands

    @property
    def image(self) -> str:
        return str(self.folder / "image.tif")

    @property
    def labels(self) -> str:
        return str(self.folder / "labels.tif")

    @property
    def first(self) -> Path:
        """The checkpoint before any step."""
        return self.folder / "w0" / "last"

    def step(self, ranks: int, pipeline: str = "") -> Path:
        """The checkpoint after one step, made once for each number of ranks and pipeline."""
        name = f"w1-{ranks}{''.join(pipeline.split())}"
        made = self.folder / name / "last"
        options = (*SGD, *FINE, *pipeline.split())
        return made if made.exists() else self.train(ranks, 1, name, *options)

    def train(self, ranks: int, steps: int, output: str, *options: str) -> Path:
        """Train; return the last checkpoint."""
        folder = self.folder / output
        files = ("--images", self.image, "--labels", self.labels, "--output", str(folder))
        self.tilenet(ranks, "train", *files, *self.options, "--steps", str(steps), *options)
        return folder / "last"

    def predict(self, ranks: int, checkpoint: Path) -> str:
        """The map of the image's logits, made once for each number of ranks."""
        out = self.folder / f"{checkpoint.parent.name}-{ranks}.tif"
        if not out.exists():
            given = ("--output", "logits", "--device", "cpu", "--tile", "64")
            self.tilenet(ranks, "predict", str(checkpoint), self.image, str(out), *given)
        return str(out)


def check(*arguments: str | Path) -> tuple[int, str]:
    """The checker's exit code, and what it says; here, since torch's import takes longer."""
    with redirect_stdout(StringIO()) as said:
        code = check_from_outside([*map(str, arguments)])
    print(said.getvalue())
    return code, said.getvalue()


def check_equal(*arguments: str | Path) -> str:
    """What the checker says where it finds no difference."""
    code, said = check(*arguments)
    assert code == 0, said
    return said


def check_different(*arguments: str | Path) -> str:
    """What the checker says where it finds one."""
    code, said = check(*arguments)
    assert code == 1, said
    assert "DIFFERENT" in said
    return said


def write_scene(folder: Path) -> None:
    """Random pixels with two holes of nodata, random labels, a tenth of them and a corner 255."""
    rng = np.random.default_rng(7)
    pixels = rng.integers(1, 4000, (4, HEIGHT, WIDTH)).astype(np.uint16)
    pixels[:, 30:60, 50:110] = 0
    pixels[:, 150:, 200:] = 0  # at the edge, so that the extension reflects it
    labels = rng.integers(0, 3, (HEIGHT, WIDTH)).astype(np.uint8)
    labels[rng.random(labels.shape) < 0.1] = 255
    labels[100:, :70] = 255
    grid = {"height": HEIGHT, "width": WIDTH, "crs": "EPSG:32630", "driver": "GTiff"}
    grid["transform"] = rasterio.Affine(2, 0.1, 5e5, 0.1, -2, 4e6)
    with rasterio.open(folder / "image.tif", "w", count=4, dtype="uint16", nodata=0, **grid) as out:
        out.write(pixels)
    with rasterio.open(folder / "labels.tif", "w", count=1, dtype="uint8", **grid) as out:
        out.write(labels, 1)


def begin(folder: Path, network: str, tilenet: Tilenet) -> Run:
    """A run of a network on one rank, its first weights in w0/last."""
    write_scene(folder)
    common = "--classes 3 --precision float64 --device cpu --network.base 4 --network.dropout 0.2"
    made = Run(folder, (*common.split(), *network.split()), tilenet)
    made.train(1, 0, "w0")
    return made


@pytest.fixture(scope="module", params=NETWORKS)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tilenet: Tilenet
) -> Run:
    return begin(tmp_path_factory.mktemp(request.param), NETWORKS[request.param], tilenet)


def test_the_checker_imports_nothing_of_tilenet() -> None:
    names: set[str] = set()
    for name in ("check.py", "rebuild.py"):
        for node in ast.walk(ast.parse(Path(__file__).with_name(name).read_text())):
            if isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
            elif isinstance(node, ast.Import):
                names.update(part.name for part in node.names)
    others = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert others == {"torch", "rasterio", "numpy", "rebuild"}


def test_maps_are_the_whole_image_s_logits_on_any_number_of_ranks(run: Run) -> None:
    maps = [run.predict(ranks, run.first) for ranks in (1, 2, 4)]
    with rasterio.open(maps[0]) as file:
        spread = np.nanstd(file.read(), axis=(1, 2))
    assert spread.min() > 0.05, "a network that gives the same everywhere proves nothing"
    said = check_equal("map", run.first, run.image, *maps)
    assert said.count(": equal\n") == len(maps)


@pytest.mark.parametrize(
    ("ranks", "pipeline"),
    [
        *((ranks, "") for ranks in (1, 2, 4)),
        (1, "--partitions 2 --micro_batches 5 --checkpointing always"),
        (2, "--partitions 3 --micro_batches 4 --checkpointing except_last"),
        (4, "--partitions 4 --micro_batches 2 --checkpointing never"),
    ],
)
def test_a_step_is_the_whole_image_s_gradient(run: Run, ranks: int, pipeline: str) -> None:
    said = check_equal("step", run.first, run.step(ranks, pipeline), run.image, run.labels)
    assert said.count(": equal\n") == 2, "statistics and gradient"


@pytest.mark.parametrize(
    ("norm", "mode", "ranks"),
    [
        ("none", "exchange", 4),
        ("instance", "exchange", 4),
        ("group", "exchange", 2),
        ("batch", "overlap", 4),
    ],
)
def test_a_step_of_ranks_that_exchange_is_the_whole_image_s_gradient(
    tmp_path: Path, tilenet: Tilenet, norm: str, mode: str, ranks: int
) -> None:
    groups = "--network.groups 2" if norm == "group" else ""
    run = begin(tmp_path, f"--network.poolings 2 --network.norm {norm} {groups}", tilenet)
    second = run.train(ranks, 1, "w1", *SGD, "--halo_mode", mode)
    check_equal("step", run.first, second, run.image, run.labels)
    if norm != "none":
        tiled = run.train(ranks, 1, "tile", *SGD, "--network.norm_scope", "tile")
        # It says so of itself, and no two networks are compared; here it must show in the numbers.
        shutil.copy(run.first / "network.json", tiled)
        check_different("step", run.first, tiled, run.image, run.labels)
    # One window per rank, and for norms over the image tile after tile in passes.
    out = str(tmp_path / "map.tif")
    given = ("--output", "logits", "--device", "cpu")
    tilenet(ranks, "predict", str(second), run.image, out, *given)
    check_equal("map", second, run.image, out, run.predict(ranks, second))


def test_class_weights_divide_by_their_sum_over_pixels(tmp_path: Path, tilenet: Tilenet) -> None:
    run = begin(tmp_path, "--network.poolings 1 --network.convolutions 1 --seed 3", tilenet)
    options = (*SGD, *FINE, "--class_weights", "[1.0, 0.25, 7.0]")
    second = run.train(2, 1, "w1", *options)
    step = ("step", run.first, second, run.image, run.labels, "--seed", "3")
    check_equal(*step, "--class-weights", "1", "0.25", "7")
    check_different(*step)


def test_a_black_collar_is_left_out_and_a_lake_is_not(tmp_path: Path, tilenet: Tilenet) -> None:
    run = begin(tmp_path, "--network.poolings 1 --network.convolutions 1 --nodata collar", tilenet)
    second = run.train(2, 1, "w1", *SGD, *FINE)
    check_equal("step", run.first, second, run.image, run.labels)
    with rasterio.open(made := run.predict(2, second)) as file:
        nothing = np.isnan(file.read(1))
    assert nothing[150:, 200:].all()
    assert nothing.sum() == 7 * 11, "the hole inside is data"
    check_equal("map", second, run.image, made)


def test_maps_with_batch_norm_use_running_statistics(tmp_path: Path, tilenet: Tilenet) -> None:
    network = "--network.poolings 2 --network.norm batch --network.norm_scope tile"
    run = begin(tmp_path, network, tilenet)
    trained = run.train(2, 3, "w3", "--optimizer.lr", "0.01", *FINE)
    tensors = read_safetensors(trained / "weights.safetensors")
    running = [tensor for name, tensor in tensors.items() if name.endswith(".running_mean")]
    assert running
    assert all(bool((mean != 0).any()) for mean in running)  # a channel may be dropped each time
    check_equal("map", trained, run.image, run.predict(2, trained))


def test_a_weight_off_by_a_millionth_is_found_in_the_map(run: Run) -> None:
    made = run.predict(1, run.first)
    path = run.first / "weights.safetensors"
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    begins, _ = json.loads(whole[8:start])["0.weight"]["data_offsets"]
    place = slice(start + begins, start + begins + 8)
    changed = bytearray(whole)
    changed[place] = (np.frombuffer(whole[place], "<f8") + 1e-6).tobytes()
    path.write_bytes(changed)
    try:
        check_different("map", run.first, run.image, made)
    finally:
        path.write_bytes(whole)


def test_a_halo_that_is_one_unit_too_small_is_found_in_the_step(run: Run) -> None:
    network = json.loads((run.first / "network.json").read_text())
    if network["padding"] == "valid":
        pytest.skip("an unpadded network's halo cannot be chosen")
    halo = network["halo_px"] - network["alignment_px"]
    # Tiles of one or two units: larger ones near the edges have context to spare.
    second = run.train(1, 1, "small-halo", *SGD, "--halo", str(halo), "--tiles.size_px", "16")
    said = check_different("step", run.first, second, run.image, run.labels)
    assert re.search(r"^statistics: off by \S+: equal$", said, re.MULTILINE)


def test_other_dropout_masks_are_found_in_the_step(run: Run) -> None:
    step = ("step", run.first, run.step(1), run.image, run.labels)
    check_different(*step, "--seed", "1")
