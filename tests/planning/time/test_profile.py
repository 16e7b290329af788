"""Profiles: what is written is read again, what makes no sense is refused in a sentence."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Activation, Conv, Layer, Norm
from tilenet.planning.time.profile import (
    Profile,
    ProfiledLayer,
    layer_times_of_profile,
    read_profile,
)

LAYERS: tuple[Layer, ...] = (Conv(4, 8), Norm(8, 8), Activation(8, 8), Conv(8, 1, kernel=1))


@pytest.fixture
def profile() -> Profile:
    rng = random.Random(7)
    layers = tuple(ProfiledLayer(layer, rng.random(), rng.random()) for layer in LAYERS)
    return Profile("Tesla V100", "float16", 160, 224, layers, {"reserve": 0.07})


def written(folder: Path, entry: Any) -> Path:
    path = folder / "profile.json"
    path.write_text(entry if isinstance(entry, str) else json.dumps(entry))
    return path


def test_what_is_written_is_read_again(tmp_path: Path, profile: Profile) -> None:
    entry = profile.to_json()
    assert read_profile(written(tmp_path, entry)) == profile
    del entry["memory"]  # which is optional
    assert read_profile(written(tmp_path, entry)).memory == {}


def test_seconds_follow_the_pixels(profile: Profile) -> None:
    times = layer_times_of_profile(profile, LAYERS, 320, 112)
    assert [t.forward_s for t in times] == [layer.forward_s for layer in profile.layers]
    times = layer_times_of_profile(profile, LAYERS, 480, 224)
    for time, layer in zip(times, profile.layers, strict=True):
        assert time.forward_s == pytest.approx(3 * layer.forward_s)
        assert time.backward_s == pytest.approx(3 * layer.backward_s)


def test_a_profile_of_another_network_is_refused(profile: Profile) -> None:
    first, norm, activation, last = LAYERS
    wider = (Conv(4, 16), Norm(16, 16), Activation(16, 16), Conv(16, 1, kernel=1))
    for layers, said in (
        (LAYERS[:3], "in the profile: 4, in the network: 3"),
        (wider, r"0, conv, in the profile: out_channels 8, in the network: out_channels 16\)"),
        ((*LAYERS[:3], replace(last, kernel=3)), "3, conv, .*: kernel 1, in the network: kernel 3"),
        ((first, activation, norm, last), "layer 1 in the profile: norm, in the network: activ"),
    ):
        with pytest.raises(TilenetError, match=said):
            layer_times_of_profile(profile, layers, 64, 64)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", '{"tilenet_profile": NaN}', "9" * 9999])
def test_hostile_json_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TilenetError, match=r"write .* with tilenet profile"):
        read_profile(written(tmp_path, text))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("tilenet_profile", value) for value in (1, 3, True, "2", None)),
        *(("height", value) for value in (0, "wide", 10**4000, None)),
        *(("layers", value) for value in ([], [3], {"a": 1}, None)),
        ("memory", 7),
        *(("forward_s", value) for value in (-1e-9, 1e7, "x", None, [], 10**4000)),
        *(("backward_s", float(value)) for value in ("nan", "inf", "-inf")),
        *(("kind", value) for value in ("con", 3, None, ["conv"], "conv")),
        ("colour", 3),
    ],
)
def test_values_that_make_no_sense_are_refused(
    tmp_path: Path, profile: Profile, key: str, value: Any
) -> None:
    """Of the profile, or of a layer."""
    entry = profile.to_json()
    holder = entry if key in entry else entry["layers"][2]
    holder[key] = value
    with pytest.raises(TilenetError, match="must be a profile"):
        read_profile(written(tmp_path, entry))


def test_a_profile_without_seconds_is_refused(tmp_path: Path, profile: Profile) -> None:
    entry = profile.to_json()
    for layer in entry["layers"]:
        layer["forward_s"] = layer["backward_s"] = 0.0
    with pytest.raises(TilenetError, match="some above 0"):
        read_profile(written(tmp_path, entry))
    entry["layers"][1]["backward_s"] = 1e-9
    assert read_profile(written(tmp_path, entry)).layers[0].forward_s == 0


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TilenetError, match="readable file"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(TilenetError, match="no JSON"):
        read_profile(tmp_path / "binary.json")
