"""What `tilenet info` answers."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from affine import Affine

from tilenet.__main__ import main

Write = Callable[..., str]
SIZE = 40, 60
GRID = Affine(2, 0.1, 5e5, 0.1, -2, 4e6)


def pixels(bands: int, dtype: str = "uint16", seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 250, (bands, *SIZE)).astype(dtype)


def not_json(name: str) -> None:
    raise AssertionError(name)


def asked(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[Any]:
    capfd.readouterr()
    assert main(["info", *arguments, "--json"]) == code
    images: list[Any] = json.loads(capfd.readouterr().out, parse_constant=not_json)["images"]
    return images


def shown(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    capfd.readouterr()
    assert main(["info", *arguments]) == code
    return capfd.readouterr()
