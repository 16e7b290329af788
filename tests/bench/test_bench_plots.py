"""bench/plots.py draws the kept results, and the picture of docs/speed.md is up to date."""

import hashlib
import json

import pytest
from PIL import Image

from bench import plots


@pytest.mark.parametrize("name", sorted(plots.PLOTS))
def test_axes_have_titles_and_units(name: str) -> None:
    for axes in plots.figure_of(name, json.loads(plots.result_text(name))).axes:
        assert axes.get_title(loc="left")
        assert axes.get_ylabel()


def test_the_picture_is_small_and_of_the_kept_result() -> None:
    assert plots.PICTURE.stat().st_size <= 100_000
    source = hashlib.sha256(plots.result_text("scaling").encode()).hexdigest()
    with Image.open(plots.PICTURE) as picture:
        assert picture.info["Source"] == source, "run python -m bench.plots"
