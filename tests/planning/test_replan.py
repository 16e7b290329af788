"""A plan made again for other nodes keeps all that a result could depend on, and fits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from questions import small_machine, small_question

from tilenet.cli.plan import main
from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions
from tilenet.planning.advise import question_again
from tilenet.planning.plan import Plan, Question, write_plan
from tilenet.planning.search import Search

KEPT = ("tiles", "halo", "halo_mode", "partitions", "balance", "batch_size", "precision")


def again(plan: Plan, folder: Path, nodes: int) -> Plan:
    write_plan(plan, folder / "plan.json")
    return Search(question_again(folder / "plan.json", nodes)).best(1)[0]


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
    options = UNetOptions(poolings=1, convolutions=1, base=4)
    asked = Question(options, 3, (90, 70), small_machine(4, 2**26), grid=(4, 4), halo="epsilon")
    asked = replace(asked, nodes=5, partitions=2, micro_batches=2, batch_size=3)
    plan = Search(asked).best(1)[0]
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
    options = UNetOptions(poolings=1, convolutions=1, base=4)
    asked = Question(options, 3, (90, 70), small_machine(2, 2**26), grid=(4, 4), partitions=2)
    plan = Search(replace(asked, nodes=11, micro_batches=4)).best(1)[0]
    assert plan.tiles_per_rank == 4
    found = again(plan, tmp_path, 10)
    assert (found.tiles_per_rank, found.layout.micro_batches) == (2, 2)


def test_shares_of_an_exchange_grow(tmp_path: Path) -> None:
    options = UNetOptions(poolings=1, convolutions=1, base=4)
    asked = Question(options, 3, (90, 70), small_machine(2, 2**26), halo_mode="exchange", nodes=3)
    plan = Search(asked).best(1)[0]
    found = again(plan, tmp_path, 2)
    assert found.layout.grid == found.mesh[1:]
    assert found.num_ranks == 2 * found.ranks_per_node
    assert found.layout.partitions == plan.layout.partitions


SMALL = ["--poolings", "1", "--base", "4", "--image", "150x110", "--grid", "4x6"]


@pytest.fixture
def plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "plan.json"
    assert main([*SMALL, "--machine", "slurm", "--nodes", "2", "-o", str(path)]) == 0
    capsys.readouterr()
    return path


def test_the_command_makes_it(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = plan_file.with_name("other.json")
    assert main(["--again", str(plan_file), "--nodes", "3", "-o", str(other)]) == 0
    assert "150 × 110 × 4 px on 3 × 4 NVIDIA A100" in capsys.readouterr().out
    before, after = (json.loads(path.read_text()) for path in (plan_file, other))
    assert before["run"]["mesh"] != after["run"]["mesh"]
    assert before["run"]["tiles"] == after["run"]["tiles"] == {"rows": 4, "columns": 6}
    assert before["asked"]["machine"] == after["asked"]["machine"]


def test_the_command_refuses_what_the_plan_says(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--again", str(plan_file), "--nodes", "3", "--grid=2x2"]) == 2
    assert "not --grid" in capsys.readouterr().err
    assert main(["--again", str(plan_file), "--nodes", "0"]) == 1
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
        question_again(plan_file, 2)
