"""Checkpoints: whole or not there at all."""

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tilenet.errors import TilenetError
from tilenet.storage import checkpoints as module
from tilenet.storage.checkpoints import (
    FILES,
    Checkpoint,
    checkpoint_of_step,
    find_checkpoint,
    load_json,
    load_tensors,
    mark_best,
    save_checkpoint,
)
from tilenet.storage.checksums import wrong_file
from tilenet.storage.whole_checkpoint import newest_whole

NETWORK = {"format": "tilenet-network-1", "layers": [{"kind": "conv", "kernel": 3}]}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "0.weight": torch.randn(4, 3, 5, 5, generator=generator, dtype=torch.float64),
        "0.bias": torch.randn(4, generator=generator).requires_grad_(),
        "7.weight": torch.randn(2, 3, 3, 7, generator=generator).transpose(1, 3),  # not contiguous
        "9.running_mean": torch.randn(6, generator=generator).bfloat16(),
        "9.num_batches_tracked": torch.tensor(12345678901),
    }


def optimizer_state(seed: int) -> dict[str, torch.Tensor]:
    state = {}
    for name, tensor in tensors(seed).items():
        if tensor.is_floating_point():
            state[f"{name}.step"] = torch.tensor(17.0)
            state[f"{name}.exp_avg"] = tensor.detach() / 3
    return state


def save(run: Path, step: int, keep: int = 2) -> Path:
    return save_checkpoint(
        run, step, Checkpoint(tensors(step), NETWORK, optimizer_state(step)), keep
    )


def assert_whole(folder: Path, step: int) -> None:
    """The checkpoint of that step, to the last bit."""
    assert load_json(folder / "progress.json") == {"step": step}
    assert load_json(folder / "network.json") == NETWORK
    for name, wanted in (("weights", tensors(step)), ("state", optimizer_state(step))):
        found = load_tensors(folder / f"{name}.safetensors")
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert found[key].dtype == tensor.dtype
            assert torch.equal(found[key], tensor)


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = save(tmp_path, 123)
    assert folder == tmp_path / "checkpoints" / "step-00000123"
    assert sorted(os.listdir(folder)) == [
        *("checksums.json", "network.json", "progress.json"),
        *("state.safetensors", "weights.safetensors"),
    ]
    assert_whole(folder, 123)
    assert_whole(tmp_path / "last", 123)
    assert_whole(find_checkpoint(tmp_path), 123)
    assert find_checkpoint(folder) == folder
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert_whole(find_checkpoint(moved), 123)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for step in (2, 10, 9, 100):
        save(tmp_path, step, keep)
    kept = sorted(os.listdir(tmp_path / "checkpoints"))
    assert kept == [f"step-{step:08d}" for step in (9, 10, 100)][-keep:]
    assert_whole(tmp_path / "last", 100)


def test_the_best_is_kept_however_old_it_is(tmp_path: Path) -> None:
    for step in range(1, 7):
        save_checkpoint(tmp_path, step, Checkpoint(tensors(step), NETWORK), best=step < 3)
    kept = sorted(os.listdir(tmp_path / "checkpoints"))
    assert kept == [f"step-{step:08d}" for step in (2, 5, 6)]
    assert load_json(find_checkpoint(tmp_path / "best") / "progress.json") == {"step": 2}
    found = checkpoint_of_step(tmp_path, 5)
    assert found == tmp_path / "checkpoints" / kept[1]
    mark_best(tmp_path, found)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == kept[1:]
    assert load_json(tmp_path / "best" / "progress.json") == {"step": 5}
    assert load_json(tmp_path / "last" / "progress.json") == {"step": 6}


def test_an_interrupted_link_leaves_best_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, Checkpoint(tensors(step), NETWORK), best=step == 1)
    with monkeypatch.context() as broken:
        break_at(broken, Path, "symlink_to", 1)
        with pytest.raises(TilenetError, match=r"folder must be writable .*No space left"):
            mark_best(tmp_path, tmp_path / "checkpoints" / "step-00000002")
    assert load_json(tmp_path / "best" / "progress.json") == {"step": 1}


FAULTS = [
    (module.os, "fsync", 1),
    (module.os, "fsync", 3),
    (module.os, "fsync", 5),
    (module.os, "fsync", 7),
    (Path, "mkdir", 1),
    (Path, "write_text", 2),
    (Path, "rename", 1),
    (Path, "symlink_to", 1),
    (Path, "replace", 1),
    (module, "save_file", 2),
]


def break_at(monkeypatch: pytest.MonkeyPatch, place: object, name: str, call: int) -> None:
    """Let the call of that number, and all later ones, fail as on a full disk."""
    real, calls = getattr(place, name), []

    def fail(*arguments: object, **options: object) -> object:
        calls.append(name)
        if len(calls) >= call:
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)

    monkeypatch.setattr(place, name, fail)


@pytest.mark.parametrize(("place", "name", "call"), FAULTS, ids=str)
def test_an_interrupted_save_leaves_last_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: object, name: str, call: int
) -> None:
    save(tmp_path, 10)
    with monkeypatch.context() as broken:
        break_at(broken, place, name, call)
        with pytest.raises(TilenetError, match=r"No space left on device.*--resume") as raised:
            save(tmp_path, 20)
    assert "\n" not in str(raised.value)
    assert_whole(find_checkpoint(tmp_path), 10)
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if "part" in name]
    save(tmp_path, 20)
    assert_whole(find_checkpoint(tmp_path), 20)


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    sums = load_json(folder / "checksums.json")
    assert sorted(sums) == sorted({*os.listdir(folder)} - {"checksums.json"})
    for name, said in sums.items():
        content = (folder / name).read_bytes()
        assert said == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def shortened(content: bytes) -> bytes:
    return content[:-1]


def flipped(content: bytes) -> bytes:
    """A bit of the last value is another one."""
    place = len(content) - 3
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def emptied(content: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [shortened, flipped, emptied])
def test_a_disk_that_lies_is_found_out_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[bytes], bytes]
) -> None:
    save(tmp_path, 10)
    real = module.sync

    def sync(path: Path) -> None:
        real(path)
        if path.name == name:  # it said that it has it
            path.write_bytes(change(path.read_bytes()))

    monkeypatch.setattr(module, "sync", sync)
    folder = save(tmp_path, 20)
    going_on = newest_whole(tmp_path)
    assert [one.folder for one in going_on.broken] == [folder]
    assert going_on.checkpoint == tmp_path / "checkpoints" / "step-00000010"


def test_the_names_last_and_best_are_on_the_disk_too(
    tmp_path: Path, acts: list[tuple[str, str]]
) -> None:
    save(tmp_path, 10)
    acts.clear()
    save_checkpoint(tmp_path, 20, Checkpoint(tensors(20), NETWORK), keep=1, best=True)
    assert acts[-5:] == [
        ("sync", str(tmp_path / "checkpoints")),
        ("rename", str(tmp_path / "last")),
        ("sync", str(tmp_path)),
        ("rename", str(tmp_path / "best")),
        ("sync", str(tmp_path)),
    ]


def test_values_that_are_no_numbers_are_read_back_as_well(tmp_path: Path) -> None:
    values = {"0.weight": torch.tensor([float("nan"), -0.0, float("inf")]), "1.a": torch.empty(0)}
    folder = save_checkpoint(tmp_path, 1, Checkpoint(values, NETWORK))
    assert torch.equal(
        load_tensors(folder / "weights.safetensors")["0.weight"].isnan(),
        torch.tensor([True, False, False]),
    )


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [shortened, flipped, emptied])
def test_what_is_wrong_is_said_of_the_file(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes]
) -> None:
    folder = save(tmp_path, 1)
    assert wrong_file(folder, FILES) is None
    before = (folder / name).read_bytes()
    (folder / name).write_bytes(change(before))
    size = len(change(before))
    differs = f"{name} has {size} bytes of {len(before)}"
    if size == len(before):
        differs = f"{name} is not what checksums.json says: its SHA-256 differs"
    assert wrong_file(folder, FILES) == differs
    (folder / name).unlink()
    assert wrong_file(folder, FILES) == f"{name} is missing"
    assert wrong_file(folder, [one for one in FILES if one != name]) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"weights', "checksums.json cannot be read: "),
        (b"[1]", "weights.safetensors has no SHA-256 in checksums.json"),
        (b'{"weights.safetensors": {"bytes": 3}}', "weights.safetensors has no SHA-256"),
    ],
)
def test_checksums_that_are_none_make_a_checkpoint_broken(
    tmp_path: Path, content: bytes, said: str
) -> None:
    folder = save(tmp_path, 1)
    (folder / "checksums.json").write_bytes(content)
    assert (wrong_file(folder, FILES) or "").startswith(said)


def test_a_folder_made_by_hand_needs_no_checksums(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "checksums.json").unlink()
    assert wrong_file(folder, FILES) is None
    (folder / "state.safetensors").unlink()
    assert wrong_file(folder, FILES) == "state.safetensors is missing"


def test_what_a_killed_run_left_is_no_obstacle(tmp_path: Path) -> None:
    aside = tmp_path / "checkpoints" / ".step-00000003.part"
    aside.mkdir(parents=True)
    (aside / "weights.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoints" / ".step-00000001.part").mkdir()
    (tmp_path / ".last.part").symlink_to("nowhere")
    save(tmp_path, 3)
    assert_whole(tmp_path / "last", 3)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000003"]
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "last"]


@pytest.mark.parametrize("call", [1, 2])
def test_saving_a_step_again_never_leaves_last_dangling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    save(tmp_path, 10)
    with monkeypatch.context() as broken:
        break_at(broken, Path, "rename", call)
        for _ in range(call):
            with contextlib.suppress(TilenetError):
                save(tmp_path, 10)
    assert_whole(find_checkpoint(tmp_path), 10)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_files_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = save(tmp_path, 1)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o666 & ~umask}
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask


# --- broken files


TENSORS = ("weights.safetensors", "state.safetensors")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        *((name, share, "whole.*use another") for name in TENSORS for share in (0, 0.05, 0.999)),
        ("progress.json", 0, "must be whole"),
        ("progress.json", b'{"step": ', "must be whole"),
        ("progress.json", b"\xff\xfe", "must be whole"),
        ("progress.json", b"[" * 100_000, "must be whole"),
        ("progress.json", b"[1, 2]", r"must hold a JSON object \(got list\)"),
    ],
)
def test_a_broken_or_missing_file_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: bytes | float, said: str
) -> None:
    """`content`: what it holds, or the share of it that is left."""
    file = save(tmp_path, 1) / name
    before, load = file.read_bytes(), load_json if name.endswith("json") else load_tensors
    file.write_bytes(
        content if isinstance(content, bytes) else before[: int(len(before) * content)]
    )
    with pytest.raises(TilenetError, match=said) as raised:
        load(file)
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)
    file.unlink()
    with pytest.raises(TilenetError, match="No such file"):
        load(file)


@pytest.mark.parametrize("missing", ["weights.safetensors", "network.json"])
def test_a_folder_without_both_files_is_no_checkpoint(tmp_path: Path, missing: str) -> None:
    folder = save(tmp_path, 1)
    (folder / missing).unlink()
    for path in (folder, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(TilenetError, match="name the output folder of a training run"):
            find_checkpoint(path)
