"""Run files with keys that stand twice, or numbers out of range, and files that are none."""

from pathlib import Path
from typing import Any

import pytest

from tilenet.errors import TilenetError, UsageError
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.planning.memory.layer import check_weight_bytes
from tilenet.training.config.read import read_run_file

LEAST = "images: a.tif\nlabels: b.tif\nclasses: 2\noutput: out\nsteps: 1\n"


def read(tmp_path: Path, text: str, *options: str) -> Any:
    (tmp_path / "run.yaml").write_text(text)
    return read_run_file(["-c", str(tmp_path / "run.yaml"), *options])


@pytest.mark.parametrize(
    ("key", "value", "saying"),
    [
        ("seed", "9" * 400, "bits"),
        ("seed", "null", "has a value .seed: null"),
        ("optimizer", "{lr: null}", "has a value .optimizer.lr: null"),
        ("classes", "1000000000", "at most 4096 classes"),
        ("batch_size", "1000000000000", "from 1 to 2²⁰"),
    ],
)
def test_values_out_of_range_are_refused(tmp_path: Path, key: str, value: str, saying: str) -> None:
    lines = [line for line in LEAST.splitlines() if not line.startswith(key)]
    with pytest.raises(TilenetError, match=saying):
        read(tmp_path, "\n".join([*lines, f"{key}: {value}"]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 3\nread_ahead: 1\nseed: 4\n", r"\(seed in lines 6 and 8\)"),
        ("vectors: {field: f, classes: {1: 0, 1: 1}}", r"\(1 in lines 6 and 6\)"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_lines(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(UsageError, match=f"a key stands once in a run file {said}; delete one"):
        read(tmp_path, LEAST + text)
    groups = "optimizer: {name: sgd}\nschedule: {name: poly}\n"
    run, _ = read(tmp_path, f'{LEAST}{groups}vectors: {{field: f, classes: {{1: 0, "1": 1}}}}\n')
    assert (run.optimizer.name, run.schedule.name) == ("sgd", "poly")


def test_networks_larger_than_any_memory_are_refused() -> None:
    with pytest.raises(TilenetError, match="at most 100 convolutions"):
        UNetOptions(convolutions=10**9)
    with pytest.raises(TilenetError, match="weights alone"):
        check_weight_bytes(unet_layers(UNetOptions(poolings=1, base=10**6)))


@pytest.mark.parametrize(
    ("data", "saying"),
    [
        (b"", r"holds keys and values .*run\.yaml: "),
        (b"- a\n", "holds keys and values"),
        (b"a: \xe9\n", r"is UTF-8 text .*run\.yaml: .*position 3"),
        (b"config: {seed: 3}\n", "names no other ones"),
        (b"config: /etc/passwd\n", "holds keys and values"),
    ],
)
def test_files_that_are_no_run_files_are_refused(tmp_path: Path, data: bytes, saying: str) -> None:
    (tmp_path / "run.yaml").write_bytes(data)
    with pytest.raises(UsageError, match=f"a run file {saying}"):
        read_run_file(["-c", str(tmp_path / "run.yaml")])
