"""Run files and options that unfold, name other files, or hold numbers without end."""

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


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


@pytest.mark.parametrize(
    "text",
    [
        "init: " + "[" * 100_000,
        "network: " + "{a: " * 5000 + "1" + "}" * 5000,
        BOMB,
        f"bands: [{'1,' * 20_000}1]",
    ],
    ids=["nest", "groups", "laughs", "values"],
)
@pytest.mark.usefixtures("in_time")
def test_run_files_that_unfold_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="at most 20000 values, 16 levels deep"):
        read(tmp_path, LEAST + text)
    if text.startswith("network"):
        with pytest.raises(UsageError, match="at most 20000 values, 16 levels deep"):
            read(tmp_path, LEAST, f"--network={{{text}}}")


@pytest.mark.parametrize(
    "text", [r'output: "a\0"', r'swapping: {folder: "\0"}', r'bands: ["1", "\x00"]', r'"\0": 1']
)
def test_no_text_holds_a_byte_that_no_path_can(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"no text of a run file holds a NUL byte \(got '.*x00"):
        read(tmp_path, LEAST + text)


def test_aliases_may_be_used(tmp_path: Path) -> None:
    text = "images: &a [a.tif, b.tif]\nlabels: *a\nclasses: 2\noutput: out\nsteps: 1\n"
    run, _ = read(tmp_path, text)
    assert run.image_paths == run.label_paths == ("a.tif", "b.tif")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("config: /etc/passwd", ()),
        ("network: /etc/passwd", ()),
        ("", ("--network", "/etc/passwd")),
        ("", ("--network=/etc/passwd",)),
    ],
)
def test_run_files_read_no_other_files(tmp_path: Path, text: str, options: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"names no other ones|is a group of keys") as raised:
        read(tmp_path, LEAST + text, *options)
    assert "root:" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "saying"),
    [
        ("seed", "0x" + "f" * 20_000, "bits"),
        ("seed", "9" * 4000, "bits"),
        ("seed", "null", "has a value .seed: null"),
        ("optimizer", "{lr: null}", "has a value .optimizer.lr: null"),
        ("steps", "-0x" + "f" * 20_000, "bits"),
        ("vectors", "{field: a, classes: {? 0x" + "f" * 20_000 + " : 1}}", "bits"),
        ("classes", "1000000000", "at most 4096 classes"),
        ("batch_size", "1000000000000", "at most 1048576 images or crops"),
        ("profile", f"{{steps: '{'9' * 5000}'}}", "profile.steps are a first"),
    ],
)
def test_numbers_without_end_are_refused(tmp_path: Path, key: str, value: str, saying: str) -> None:
    lines = [line for line in LEAST.splitlines() if not line.startswith(key)]
    with pytest.raises(TilenetError, match=saying):
        read(tmp_path, "\n".join([*lines, f"{key}: {value}"]))


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("seed: 3\nread_ahead: 1\nseed: 4\n", (), r"\(seed in lines 6 and 8\)"),
        (
            "network:\n  base: 4\n  dropout: 0.5\n  'base': 8\n",
            (),
            r"\(network.base in lines 7 and 9\)",
        ),
        ("network.base: 4\nnetwork:\n  base: 8\n", (), r"\(network.base in lines 6 and 8\)"),
        ("bands: [{a: 1,\n a: 1}]", (), r"\(a in lines 6 and 7\)"),
        (
            "vectors: {field: f, classes: {1: 0, 1: 1}}",
            (),
            r"\(vectors.classes.1 in lines 6 and 6\)",
        ),
        ("x: &x {a: 1, a: 1}\ny: *x\n", (), r"\([xy].a in lines 6 and 6\)"),
        ("", ("--network={base: 4, base: 8}",), r"\(base in lines 1 and 1\)"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_lines(
    tmp_path: Path, text: str, options: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UsageError, match=f"a key stands once in a run file {said}; delete one"):
        read(tmp_path, LEAST + text, *options)


def test_keys_of_one_name_in_different_groups_are_legal(tmp_path: Path) -> None:
    groups = "optimizer: {name: sgd}\nschedule: {name: poly}\n"
    run, _ = read(tmp_path, f'{LEAST}{groups}vectors: {{field: f, classes: {{1: 0, "1": 1}}}}\n')
    assert (run.optimizer.name, run.schedule.name) == ("sgd", "poly")


@pytest.mark.usefixtures("in_time")
def test_networks_without_end_are_refused() -> None:
    with pytest.raises(TilenetError, match="at most 100 convolutions"):
        UNetOptions(convolutions=10**9)
    many = unet_layers(UNetOptions(poolings=1, base=4, norm="group", groups=10**15))
    assert many == unet_layers(UNetOptions(poolings=1, base=4, norm="group", groups=64))
    with pytest.raises(TilenetError, match="weights alone"):
        check_weight_bytes(unet_layers(UNetOptions(poolings=1, base=10**6)))


@pytest.mark.parametrize(
    ("data", "saying"),
    [(b"", "is empty"), (b" \n", "is empty"), (b"a: \xe9\n", r"is UTF-8 text .*byte 3 is not")],
)
def test_files_that_are_no_run_files_are_named(tmp_path: Path, data: bytes, saying: str) -> None:
    (tmp_path / "run.yaml").write_bytes(data)
    with pytest.raises(UsageError, match=f"a run file .*{saying}"):
        read_run_file(["-c", str(tmp_path / "run.yaml")])
