"""`plan.json`: what is written is read again, and runs take it; the rest is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from questions import small_machine, small_question

from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions
from tilenet.planning.plan import Plan, Question, read_plan, write_plan
from tilenet.planning.search import Search
from tilenet.training.config.read import read_run_file

REQUIRED = ["--images", "a.tif", "--labels", "b.tif", "--classes", "3", "--output", "c"]


def a_plan(**changes: Any) -> Plan:
    options = UNetOptions(poolings=1, convolutions=1, base=4)
    asked = Question(options, 3, (90, 70), small_machine(4, 2**26), partitions=2)
    return Search(replace(asked, **changes)).best(1)[0]


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
            assert planned.options == question.options
            assert planned.image == question.image
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


def test_it_must_be_possible_to_write(tmp_path: Path) -> None:
    with pytest.raises(TilenetError, match="name another file"):
        write_plan(a_plan(), tmp_path / "none" / "plan.json")


GONE = object()
HOSTILE: dict[str, Any] = {  # a file's text, or a value and its place in a good plan
    "no JSON": b"{",
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "a list": b"[1, 2]",
    "null": b"null",
    "no version": (GONE, "tilenet_plan"),
    "other version": (2, "tilenet_plan"),
    "true for a version": (True, "tilenet_plan"),
    "no run": (GONE, "run"),
    "run is a list": ([], "run"),
    "no asked": (GONE, "asked"),
    "no network": (GONE, "asked", "options"),
    "a network of a number": (3, "asked", "options"),
    "unknown key of a network": (1, "asked", "options", "colour"),
    "a text for a number of a network": ("two", "asked", "options", "poolings"),
    "poolings below 1": (0, "asked", "options", "poolings"),
    "no image": (GONE, "asked", "image"),
    "an image of three": ([1, 2, 3], "asked", "image"),
    "an image of a text": ("ab", "asked", "image"),
    "an image of nothing": ([0, 5], "asked", "image"),
    "an image of true": ([True, 5], "asked", "image"),
    "no balance": (GONE, "run", "balance"),
    "a balance of texts": (["7", "8"], "run", "balance"),
    "a balance of another length": ([1, 2, 3], "run", "balance"),
    "a balance below 1": ([0, 9], "run", "balance"),
    "partitions of a fraction": (2.5, "run", "partitions"),
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


def test_a_missing_plan_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(TilenetError, match="No such file"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(TilenetError, match="must be a readable file"):
        read_plan(tmp_path)
