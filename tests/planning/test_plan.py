"""`plan.json`: what is written is read again and taken, by other nodes too, or is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from questions import small_machine, small_question

from tilenet.cli.plan import main
from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions
from tilenet.planning.plan import Plan, Question, read_plan, write_plan
from tilenet.planning.replan import replan
from tilenet.planning.search import Search
from tilenet.training.config.read import read_run_file

REQUIRED = ["--images", "a.tif", "--labels", "b.tif", "--classes", "3", "--output", "c"]


def a_plan(devices: int = 4, **changes: Any) -> Plan:
    options = UNetOptions(poolings=1, convolutions=1, base=4)
    asked = {"machine": small_machine(devices, 2**26), "partitions": 2} | changes
    return Search(Question(options, 3, (90, 70), **asked)).best(1)[0]


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    return a_plan().to_json()


@pytest.mark.usefixtures("fewer_layouts")
def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    read = 0
    for seed in range(6):
        question = small_question(seed)
        for plan in Search(replace(question, machine=small_machine(3, 2**26))).best(1):
            write_plan(plan, path)
            planned = read_plan(path)
            assert planned.keys == plan.run_keys()
            assert planned.question == plan.question
            assert tuple(planned.mesh.values()) == plan.mesh
            assert planned.balance == plan.balance
            read += 1
    assert read > 3
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("halo", ["exact", "epsilon", 4])
def test_a_run_takes_what_was_planned(tmp_path: Path, halo: int | str) -> None:
    plan = a_plan(halo=halo, grid=(3, 2), micro_batches=3, nodes=1, batch_size=2)
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    run, _ = read_run_file([*REQUIRED, "--steps", "1", "--plan", str(path)])
    assert (run.mesh.replicas, run.mesh.rows, run.mesh.columns) == plan.mesh
    assert (run.tiles.rows, run.tiles.columns) == (3, 2)
    assert run.halo == halo
    assert run.partitions == 2
    assert run.balance == list(plan.balance)
    assert run.micro_batches == 3
    assert run.checkpointing == plan.layout.checkpointing
    assert run.batch_size == 2
    assert run.precision == "float32"


def test_what_the_command_line_says_has_the_last_word(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(a_plan(grid=(3, 2)), path)
    more = ["--micro_batches", "1", "--precision", "float64", "--tiles.rows", "4"]
    run, _ = read_run_file([*REQUIRED, "--steps", "1", "--plan", str(path), *more])
    assert (run.micro_batches, run.precision, run.tiles.rows) == (1, "float64", 4)
    assert run.tiles.columns == 2


GONE = object()
HOSTILE: dict[str, Any] = {  # a file's text, or a value and its place in a good plan
    "no JSON": b"{",
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "a list": b"[1, 2]",
    "other version": (2, "tilenet_plan"),
    "true for a version": (True, "tilenet_plan"),
    "run is a list": ([], "run"),
    "no asked": (GONE, "asked"),
    "no network": (GONE, "asked", "options"),
    "a network of a number": (3, "asked", "options"),
    "unknown key of a network": (1, "asked", "options", "colour"),
    "a text for a number of a network": ("two", "asked", "options", "poolings"),
    "poolings below 1": (0, "asked", "options", "poolings"),
    "an image of three": ([1, 2, 3], "asked", "image"),
    "an image of nothing": ([0, 5], "asked", "image"),
    "an image of true": ([True, 5], "asked", "image"),
    "no balance": (GONE, "run", "balance"),
    "a balance of texts": (["7", "8"], "run", "balance"),
    "a balance of another length": ([1, 2, 3], "run", "balance"),
    "a balance below 1": ([0, 9], "run", "balance"),
    "sharers of a text": ("2", "answer", "sharers"),
    "no rank that shares": (0, "answer", "sharers"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_plan_is_refused_in_a_sentence(
    tmp_path: Path, good: dict[str, Any], name: str
) -> None:
    path, change = tmp_path / "plan.json", HOSTILE[name]
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        value, *outer, key = change
        entry = holder = json.loads(json.dumps(good))
        for one in outer:
            holder = holder[one]
        holder[key] = value
        if value is GONE:
            del holder[key]
        path.write_text(json.dumps(entry))
    with pytest.raises(TilenetError, match=r"plan\.json") as refusal:
        read_plan(path)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).endswith("write one with tilenet plan -o")


def test_keys_that_stand_twice_are_refused(tmp_path: Path, good: dict[str, Any]) -> None:
    path = tmp_path / "plan.json"
    text = json.dumps(good)
    path.write_text(text.replace('"asked": {', '"asked": {"image": [1, 1], ', 1))
    with pytest.raises(TilenetError, match=r"the key 'image' stands 2 times in one object"):
        read_plan(path)


def test_a_plan_that_cannot_be_read_or_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(TilenetError, match="name another file"):
        write_plan(a_plan(), tmp_path / "none" / "plan.json")
    with pytest.raises(TilenetError, match="No such file"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(TilenetError, match="must be a readable file"):
        read_plan(tmp_path)


KEPT = ("tiles", "halo", "halo_mode", "partitions", "balance", "batch_size", "precision")


def again(plan: Plan, folder: Path, nodes: int) -> Plan:
    write_plan(plan, folder / "plan.json")
    return Search(replan(folder / "plan.json", nodes)).best(1)[0]


@pytest.mark.usefixtures("fewer_layouts")
def test_the_same_nodes_give_the_same_plan(tmp_path: Path) -> None:
    made = 0
    for seed in range(12):
        asked = replace(small_question(seed), machine=small_machine(3, 2**26))
        for plan in Search(asked).best(1):
            found = again(plan, tmp_path, asked.nodes)
            assert found.run_keys() == plan.run_keys()
            assert found.device_bytes == plan.device_bytes
            made += 1
    assert made > 6


def test_other_nodes_change_the_ranks_alone(tmp_path: Path) -> None:
    """All of a device's bytes stay, so that what fits goes on fitting."""
    plan = a_plan(grid=(4, 4), halo="epsilon", nodes=5, micro_batches=2, batch_size=3)
    meshes = set()
    for nodes in range(1, 9):
        found = again(plan, tmp_path, nodes)
        assert found.num_ranks == 2 * nodes
        assert found.ranks_per_node == plan.ranks_per_node
        assert found.device_bytes <= plan.device_bytes
        for key in KEPT:
            assert found.run_keys()[key] == plan.run_keys()[key]
        meshes.add(found.mesh)
    assert len(meshes) == 8


def test_a_rank_with_fewer_tiles_than_micro_batches_takes_them_all(tmp_path: Path) -> None:
    plan = a_plan(2, grid=(4, 4), nodes=11, micro_batches=4)
    assert plan.tiles_per_rank == 4
    found = again(plan, tmp_path, 10)
    assert (found.tiles_per_rank, found.layout.micro_batches) == (2, 2)


def test_shares_of_an_exchange_grow(tmp_path: Path) -> None:
    plan = a_plan(2, halo_mode="exchange", nodes=3, partitions=None)
    found = again(plan, tmp_path, 2)
    assert found.layout.grid == found.mesh[1:]
    assert found.num_ranks == 2 * found.ranks_per_node
    assert found.layout.partitions == plan.layout.partitions


SMALL = ["--poolings", "1", "--base", "4", "--image", "150x110", "--grid", "4x6"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("written") / "plan.json"
    assert main([*SMALL, "--machine", "slurm", "--nodes", "2", "-o", str(path)]) == 0
    return path.read_text()


@pytest.fixture
def plan_file(tmp_path: Path, written: str) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(written)
    return path


def test_the_command_makes_it(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = plan_file.with_name("other.json")
    assert main(["--replan", str(plan_file), "--nodes", "3", "-o", str(other)]) == 0
    assert "150 × 110 × 4 px on 3 × 4 NVIDIA A100" in capsys.readouterr().out
    before, after = (json.loads(path.read_text()) for path in (plan_file, other))
    assert before["run"]["mesh"] != after["run"]["mesh"]
    assert before["run"]["tiles"] == after["run"]["tiles"] == {"rows": 4, "columns": 6}
    assert before["asked"]["machine"] == after["asked"]["machine"]


def test_the_command_refuses_what_the_plan_says(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--replan", str(plan_file), "--nodes", "3", "--grid=2x2"]) == 2
    assert "not --grid" in capsys.readouterr().err
    assert main(["--replan", str(plan_file), "--nodes", "0"]) == 1
    assert "nodes must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("asked", "optimizer", "lion"),
        ("asked", "precision", None),
        ("asked", "batch_size", 1.5),
        ("asked", "num_images", True),
        ("asked", "machine", "slurm"),
        ("asked", "machine", {"name": "slurm"}),
        ("asked", "halo", [3]),
        ("asked", "reserve", "much"),
        ("run", "tiles", {"rows": 4}),
        ("run", "tiles", {"rows": 4, "columns": 0}),
        ("run", "micro_batches", "all"),
        ("run", "checkpointing", "sometimes"),
    ],
)
def test_a_plan_without_its_question_is_refused(
    plan_file: Path, part: str, key: str, value: Any
) -> None:
    entry = json.loads(plan_file.read_text())
    entry[part][key] = value
    plan_file.write_text(json.dumps(entry))
    with pytest.raises(TilenetError):
        replan(plan_file, 2)
