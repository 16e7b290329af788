"""Modules made from seeds are exact in one piece and in tiles, or refused in one sentence."""

import os

import pytest
from grammar import generate
from referee import judge
from survey import mode_of

# `make fuzz` asks for more, and with another seed for others.
COUNT = int(os.environ.get("GENERATED_MODULES", "60"))
FIRST = int(os.environ.get("GENERATED_FROM", "0"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_module_is_exact_or_refused(seed: int) -> None:
    module = generate(seed)
    outcome = judge(module, mode_of(seed))
    assert outcome.kind in ("exact", "refused"), (
        f"seed {seed} ({mode_of(seed)}): {outcome.kind}, {outcome.words}\n{outcome.more}\n"
        f"{module.describe()}\npython tests/adoption/survey.py --from {seed} --count 1 --reduce"
    )
