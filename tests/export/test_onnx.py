"""An .onnx file gives our logits, and says to other programs how it is to be run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tilenet
from tilenet.__main__ import main
from tilenet.export import program

Run = Callable[[str], Path]
WHY = "needs onnx, onnxscript and onnxruntime, which tilenet does without"


@pytest.fixture
def session() -> Callable[[Path], Any]:
    """An .onnx file as onnxruntime opens it."""
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name, reason=WHY)
    runtime = pytest.importorskip("onnxruntime", reason=WHY)

    def opened(path: Path) -> Any:
        return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    return opened


@pytest.mark.parametrize(
    ("way", "output"), [("unet", "logits"), ("unpadded", "probabilities"), ("own", "logits")]
)
def test_a_window_gets_our_logits(
    run: Run, pixels: NDArray[Any], session: Any, tmp_path: Path, way: str, output: str
) -> None:
    out = tmp_path / "net.onnx"
    arguments = [str(run(way)), str(out), "--output", output, "--tile", "152"]
    assert main(["export", *arguments]) == 0
    window = pixels[:, 20:172, 40:192]
    opened = session(out)
    kept = opened.get_modelmeta().custom_metadata_map
    assert json.loads(kept["tiles_size"]) == 152
    assert json.loads(kept["resolution"]) == 200
    assert [one.shape for one in opened.get_inputs()] == [[1, 2, 152, 152]]
    (found,) = opened.run(None, {"pixels": window[None].astype(np.float32)})
    wanted = tilenet.predict(run(way), window, output=output)
    cut = (152 - found.shape[2]) // 2
    assert cut == 8 * (way == "unpadded")
    wanted = wanted[:, cut : 152 - cut, cut : 152 - cut]
    assert np.ptp(wanted) > 0.01
    assert np.abs(found[0] - wanted).max() < 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.json", "net.onnx"]


def test_what_an_onnx_file_lacks_is_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(run("own")), str(tmp_path / "net.onnx")]
    monkeypatch.setattr(program, "find_spec", lambda name: name if name == "onnx" else None)
    assert main(arguments) == 1
    assert "(missing: onnxscript); pip install 'tilenet[export]'" in capsys.readouterr().err
    monkeypatch.setattr(program, "find_spec", lambda name: name)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(program.torch.onnx, "export", refuse)
    assert main(arguments) == 1
    assert "all operators of (RuntimeError: no such operator)" in capsys.readouterr().err
    monkeypatch.setattr(program, "MOST_ONNX_BYTES", 1000)
    assert main(arguments) == 1
    assert "holds weights of 1,000 bytes at most (weights: 1,908)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
