"""Training goes on while a checkpoint is written."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_run import assert_same, train
from safetensors.torch import load_file

from tilenet.storage.checkpoints import FILES
from tilenet.storage.checksums import wrong_file
from tilenet.training.folder import run_folder
from tilenet.training.step import Step


def test_training_goes_on_while_a_checkpoint_is_written(
    scene: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save but the last waits for the step after it, and the next save for it."""
    run, real, take = tmp_path / "run", run_folder.save_checkpoint, Step.take
    made = [threading.Event() for _ in range(7)]
    under_way, most = [], []

    def slow(folder: Path, step: int, *rest: Any, **more: Any) -> Path:
        under_way.append(step)
        most.append(len(under_way))
        assert step == 6 or made[step + 1].wait(60)
        path = real(folder, step, *rest, **more)
        under_way.remove(step)
        return path

    def noted(self: Step, step: int, *rest: Any) -> Any:
        done = take(self, step, *rest)
        made[step + 1].set()
        return done

    def copied(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert under_way == []  # one copy at a time is what memory is planned for
        return copies(values)

    copies = run_folder.host_copies
    monkeypatch.setattr(run_folder, "host_copies", copied)
    monkeypatch.setattr(run_folder, "in_background", lambda parameter: True)
    monkeypatch.setattr(run_folder, "save_checkpoint", slow)
    monkeypatch.setattr(Step, "take", noted)
    assert train(scene, run) == 0
    assert (under_way, most) == ([], [1, 1, 1])
    assert_same(run, whole)
    for step in (2, 4):  # copies: what later steps changed is not in them
        name = Path("checkpoints", f"step-{step:08d}", "state.safetensors")
        found, wanted = load_file(run / name), load_file(whole / name)
        assert all(torch.equal(found[key], value) for key, value in wanted.items())


def test_a_run_that_ends_early_waits_for_its_checkpoint(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real, take = tmp_path / "run", run_folder.save_checkpoint, Step.take
    fails = threading.Event()

    def slow(*arguments: Any, **more: Any) -> Path:
        assert fails.wait(60)
        return real(*arguments, **more)

    def failing(self: Step, step: int, *rest: Any) -> Any:
        if step == 2:
            fails.set()
            raise run_folder.TilenetError("a raster broke")
        return take(self, step, *rest)

    monkeypatch.setattr(run_folder, "in_background", lambda parameter: True)
    monkeypatch.setattr(run_folder, "save_checkpoint", slow)
    monkeypatch.setattr(Step, "take", failing)
    assert train(scene, run) == 1
    assert wrong_file(run / "last", FILES) is None
    assert not [t for t in threading.enumerate() if t.name == "checkpoint"]
