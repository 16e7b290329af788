"""A run that takes a plan holds the bytes that were planned, of all tiles that it has at once."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from questions import small_machine
from whole_image import random_scene

from tilenet.__main__ import main
from tilenet.planning.memory.live import LiveBytes
from tilenet.planning.plan import OwnNetwork, Plan, Question, write_plan
from tilenet.planning.search import Search
from tilenet.training.config.keys import NetworkKeys
from tilenet.training.setup.architecture import Architecture
from tilenet.training.step import Step, StepResult

SIZE = 192, 160
UNET = {"poolings": 2, "base": 8}
NETWORKS: dict[str, dict[str, Any]] = {
    "none": UNET | {"norm": "none"},
    "tile": UNET | {"norm": "instance", "norm_scope": "tile"},
    "instance": UNET | {"norm": "instance"},
    "batch": UNET | {"norm": "batch"},
    "average": {"module": "zoo:Gated"},
}
# Tiles of a micro-batch, of 2 × 3 tiles of each of 2 images
STACKED = {"none": 1, "tile": 1, "instance": 6, "batch": 12, "average": 6}


def planned(network: dict[str, Any]) -> Plan:
    found = Architecture.of(NetworkKeys(**network), 3, 3, 0)
    question = Question(
        found.options or OwnNetwork("module", found.layers), 0, SIZE, small_machine(1, 2**34),
        grid=(2, 3), micro_batches=1, checkpointing="never", optimizer="sgd", batch_size=2,
    )  # fmt: skip
    return Search(question).best(1)[0]


def counted(
    plan: Plan, network: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Most bytes alive in a step of a run that takes the plan."""
    peaks, take = [], Step.take

    def counting(step: Step, *arguments: Any) -> StepResult:
        trained = step.pipe.network
        with LiveBytes() as live:
            live.charge([*trained.parameters(), *trained.buffers()])
            live.charge(one.grad for one in trained.parameters() if one.grad is not None)
            result = take(step, *arguments)
        peaks.append(live.peak)
        return result

    monkeypatch.setattr(Step, "take", counting)
    scenes = [random_scene(folder, SIZE, seed, write=True) for seed in range(2)]
    write_plan(plan, folder / "plan.json")
    run = {
        "images": [str(scene.image) for scene in scenes],
        "labels": [str(scene.labels) for scene in scenes],
        "classes": 3,
        "output": str(folder / "run"),
        "network": network,
        "device": "cpu",
        "steps": 1,
        "optimizer": {"name": "sgd", "lr": 0.01},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    paths = str(folder / "run.yaml"), str(folder / "plan.json")
    assert main(["train", "-c", paths[0], "--plan", paths[1]]) == 0
    return peaks[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_takes_what_was_planned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(NETWORKS[name])
    assert plan.stacked == STACKED[name]
    found = counted(plan, NETWORKS[name], tmp_path, monkeypatch)
    # Norms over the whole image keep less than torch's own.
    assert found <= plan.device_bytes <= 1.2 * found
