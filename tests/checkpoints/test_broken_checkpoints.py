"""Whatever breaks a checkpoint, its run goes on from the newest whole one to the same numbers."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpointed_run import assert_same, rows, train

from tilenet.__main__ import main
from tilenet.storage.checkpoints import FILES, saved_checkpoints
from tilenet.storage.checksums import wrong_file


def removed(name: str) -> Callable[[Path], None]:
    return lambda run: (run / "last" / name).unlink()


def halved(name: str) -> Callable[[Path], None]:
    return lambda run: os.truncate(run / "last" / name, (run / "last" / name).stat().st_size // 2)


def garbled(name: str) -> Callable[[Path], None]:
    def flip(run: Path) -> None:
        content = bytearray((run / "last" / name).read_bytes())
        content[-5] ^= 4
        (run / "last" / name).write_bytes(content)

    return flip


def other_sum(run: Path) -> None:
    sums = json.loads((run / "last" / "checksums.json").read_text())
    sums["state.safetensors"]["sha256"] = sums["weights.safetensors"]["sha256"]
    (run / "last" / "checksums.json").write_text(json.dumps(sums))


def dangling(run: Path) -> None:
    shutil.rmtree((run / "last").resolve())


def unlinked(run: Path) -> None:
    """A copy without links, whose newest checkpoint is broken."""
    (run / "last" / "state.safetensors").unlink()
    (run / "last").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (removed("weights.safetensors"), "weights.safetensors is missing"),
        (halved("state.safetensors"), r"state.safetensors has \d+ bytes of \d+"),
        (garbled("state.safetensors"), "state.safetensors is not what checksums.json says"),
        (other_sum, "state.safetensors is not what checksums.json says"),
        (dangling, "it is not there"),
        (unlinked, "state.safetensors is missing"),
    ],
    ids=["no weights", "half a state", "garbled state", "another sum", "dangling", "no link"],
)
def test_a_run_goes_on_from_the_newest_whole_checkpoint(
    scene: Path,
    whole: Path,
    copied: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    said: str,
) -> None:
    run = copied
    broken = (run / "last").resolve().name
    damage(run)
    assert train(scene, run, "--resume") == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if " is broken (" in line]
    assert len(warnings) == 1
    named = run / ("last" if damage is not unlinked else f"checkpoints/{broken}")
    chosen = run / "checkpoints" / "step-00000004"
    pattern = rf"{named} is broken \({said}.*\): the run goes on from {chosen}"
    assert re.fullmatch(pattern, warnings[0])
    assert_same(run, whole)
    kept = os.listdir(run / "checkpoints")
    assert (f"broken-{broken}" in kept) == (damage is not dangling)
    # once is enough
    assert train(scene, run, "--resume", steps=7) == 0
    assert " is broken (" not in capsys.readouterr().err


def test_a_best_checkpoint_that_is_broken_is_found_again(
    scene: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied
    scores = {int(row["step"]): float(row["mean_iou"]) for row in rows(run, "validation.csv")}
    order = sorted(scores, key=lambda step: -scores[step])
    assert (run / "best").resolve().name == f"step-{order[0]:08d}"
    # so that it is not the last one as well
    last = max(step for step in scores if step != order[0])
    (run / "last").unlink()
    (run / "last").symlink_to(f"checkpoints/step-{last:08d}")
    os.truncate(run / "best" / "state.safetensors", 99)
    assert train(scene, run, "--resume", steps=last) == 0
    assert f"{run / 'best'} is broken (state.safetensors has 99 bytes" in capsys.readouterr().err
    wanted = next(step for step in order[1:] if step <= last)
    assert (run / "best").resolve().name == f"step-{wanted:08d}"
    assert wrong_file(run / "best", FILES) is None


def test_where_all_are_broken_one_sentence_says_so_and_nothing_changes(
    scene: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied
    for one in saved_checkpoints(run):
        os.truncate(one / "weights.safetensors", 100)
    before = sorted(run.rglob("*"))
    assert train(scene, run, "--resume") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "a run goes on from a whole checkpoint" in lines[0]
    for named in ("last", "checkpoints/step-00000004", "checkpoints/step-00000002"):
        assert f"{run / named}: weights.safetensors has 100 bytes of" in lines[0]
    assert sorted(run.rglob("*")) == before


def test_no_map_is_made_of_a_checkpoint_that_nobody_named(
    scene: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = copied, tmp_path / "map.tif"
    arguments = [str(scene / "held.tif"), str(out)]
    os.truncate(run / "last" / "state.safetensors", 100)  # a map needs none
    assert main(["predict", str(run), *arguments]) == 0
    out.unlink()
    capsys.readouterr()
    garbled("weights.safetensors")(run)
    older = run / "checkpoints" / "step-00000004"
    sentence = (
        f"a checkpoint's files must be whole ({run / 'last'}: weights.safetensors is not what "
        f"checksums.json says: its SHA-256 differs); name {older}, which is whole"
    )
    assert main(["predict", str(run), *arguments]) == 1
    assert capsys.readouterr().err == f"tilenet: {sentence}\n"
    assert main(["train", *begun_with(scene, run, tmp_path / "new")]) == 1
    assert sentence in capsys.readouterr().err
    assert not out.exists()
    assert main(["predict", str(older), *arguments]) == 0
    dangling(run)
    assert main(["predict", str(run), *arguments, "--overwrite"]) == 1
    assert (
        f"{run / 'last'}: it is not there); name {older}, which is whole" in capsys.readouterr().err
    )


def begun_with(scene: Path, run: Path, output: Path) -> list[str]:
    keys: dict[str, object] = {"images": scene / "train.tif", "labels": scene / "train_labels.tif"}
    keys |= {"classes": 3, "network.poolings": 1, "network.base": 4, "network.convolutions": 1}
    keys |= {"steps": 0, "precision": "float64", "output": output, "init": run, "device": "cpu"}
    return [f"--{name}={value}" for name, value in keys.items()]


def test_as_many_stay_as_the_run_file_says(scene: Path, whole: Path, tmp_path: Path) -> None:
    assert [one.name for one in saved_checkpoints(whole)] == [f"step-{n:08d}" for n in (2, 4, 6)]
    keys = {"checkpoints.keep": 2, "checkpoint_every": 1, "validation.every": 99}
    assert train(scene, tmp_path / "run", steps=5, **keys) == 0
    assert train(scene, tmp_path / "run", "--resume", steps=6, **keys) == 0
    kept = [one.name for one in saved_checkpoints(tmp_path / "run")]
    assert kept == [f"step-{n:08d}" for n in (5, 6)]
