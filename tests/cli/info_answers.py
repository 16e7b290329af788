"""What `tilenet info` answers: the fixture `info`."""

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


class Info:
    """Runs the command in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.capture = capture

    def shown(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        self.capture.readouterr()
        assert main(["info", *arguments]) == code
        return self.capture.readouterr()

    def asked(self, *arguments: str, code: int = 0) -> Any:
        text, _ = self.shown(*arguments, "--json", code=code)
        return json.loads(text, parse_constant=not_json)["images"]
