"""A run says once, before its first step, how many labelled pixels each class has."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tilenet.__main__ import main


@pytest.mark.parametrize(
    ("weights", "begins"),
    [
        ([], "labelled pixels of each class: "),
        (["--class_weights=[1, 2, 3]"], "labelled pixels of each class: "),
        (["--class_weights=auto"], "class_weights: auto: "),
    ],
    ids=["none", "list", "auto"],
)
def test_pixels_of_each_class_are_said_once(
    tmp_path: Path,
    write_raster: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    weights: list[str],
    begins: str,
) -> None:
    random = np.random.default_rng(11)
    pixels = random.integers(1, 99, (37, 53)).astype(np.uint8)
    classes = random.choice([0, 1, 255], pixels.shape, p=[0.5, 0.3, 0.2]).astype(np.uint8)
    pixels[:5] = 0
    image = write_raster("image.tif", pixels, nodata=0)
    keys = [f"--images={image}", f"--labels={write_raster('labels.tif', classes)}", "--steps=0"]
    keys += ["--network.poolings=1", "--network.base=2", "--device=cpu", f"--output={tmp_path}/run"]
    assert main(["train", *keys, '--classes=["soil", "r\\u202eoad", "water"]', *weights]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "water" in line]
    assert len(lines) == 1
    assert lines[0].startswith(begins)
    counts = [int((classes[5:] == label).sum()) for label in range(3)]
    for name, count in zip(("soil", r"r\u202eoad", "water"), counts, strict=True):
        share = f"{name} {count:,} ({count / sum(counts):.2%})"
        if weights and "auto" in weights[0]:
            assert f"({count:,} px)" in lines[0]
        else:
            assert share in lines[0]


@pytest.mark.parametrize("values", [(0, 255), (0, 1)])
def test_a_class_that_is_labelled_alone_is_said(
    tmp_path: Path,
    write_raster: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    values: tuple[int, int],
) -> None:
    random = np.random.default_rng(12)
    image = write_raster("image.tif", random.integers(1, 99, (37, 53)).astype(np.uint8))
    labels = write_raster("labels.tif", random.choice(values, (37, 53)).astype(np.uint8))
    keys = [f"--images={image}", f"--labels={labels}", "--steps=0", "--classes=2"]
    keys += ["--network.poolings=1", "--network.base=2", "--device=cpu", f"--output={tmp_path}/run"]
    assert main(["train", *keys]) == 0
    said = "0 alone is labelled, so nothing else is learned" in capsys.readouterr().err
    assert said == (values == (0, 255))
