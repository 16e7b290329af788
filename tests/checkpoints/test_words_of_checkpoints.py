"""A sentence speaks of a checkpoint only where there is one, and names its step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_run import train

from tilenet.storage import checkpoints as weights
from tilenet.training.step import Step


@pytest.mark.parametrize(
    ("step", "words"),
    [(2, "there is no checkpoint yet"), (6, "the checkpoint of step 4 is whole")],
)
@pytest.mark.parametrize("what", ["loss", "weights", "disk"])
def test_the_checkpoint_that_is_kept_is_named_by_its_step(
    scene: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_room: object,
    what: str,
    step: int,
    words: str,
) -> None:
    take = Step.take

    def spoilt(self: Step, number: int, *more: Any) -> Any:
        if number + 1 != step:
            return take(self, number, *more)
        parameter = self.pipe.network[0].weight
        if what == "loss":
            parameter.data[0] = torch.nan
        done = take(self, number, *more)
        if what == "weights":
            parameter.data[0] = torch.inf
        return done

    def save(run: Path, number: int, *arguments: Any, **more: Any) -> Any:
        if number == step and what == "disk":
            monkeypatch.setattr(weights, "save_file", no_room)
        return real(run, number, *arguments, **more)

    real = weights.save_checkpoint
    monkeypatch.setattr("tilenet.training.folder.run_folder.save_checkpoint", save)
    monkeypatch.setattr(Step, "take", spoilt)
    more = {"validation.every": 100}
    assert train(scene, tmp_path / "run", **more) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("tilenet: ")
    assert said.endswith(words)
    if what == "disk":
        assert (" again with --resume: " in said) == (step == 6)
