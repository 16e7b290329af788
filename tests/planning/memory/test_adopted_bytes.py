"""Predicted peaks of somebody else's networks against real steps, and the formula against both."""

import random

import pytest
from dry_run import dry_run, measured_run
from networks import random_balance
from zoo import ZOO, network

from tilenet.adoption.adopt import adopt
from tilenet.geometry.layers import Layer
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.partition import partition_bytes


@pytest.fixture(scope="module")
def lists() -> dict[str, tuple[Layer, ...]]:
    return {name: adopt(network(name), 3).layers for name in ZOO}


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("name", ZOO)
def test_bytes_of_a_step(lists: dict[str, tuple[Layer, ...]], name: str, mode: str) -> None:
    draw = random.Random(f"{name} {mode}")
    layers = lists[name]
    for most_partitions in (1, 4):
        balance = random_balance(draw, len(layers), most_partitions)
        tile, many = (8 * draw.randint(6, 12), 8 * draw.randint(6, 12)), draw.randint(1, 3)
        case = (layers, tile, balance, many, mode)
        predicted, measured = dry_run(*case), measured_run(*case)  # type: ignore[arg-type]
        assert predicted == measured
        costs = layer_bytes(layers, *tile)
        formula = [p.total for p in partition_bytes(costs, balance, many, mode)]  # type: ignore[arg-type]
        for found, needed in zip(formula, predicted.partitions, strict=True):
            # Joins of maps that several partitions keep: nearer on larger tiles.
            assert 0.94 * needed - 1024 <= found
        # Of networks of two layers copies with padding around them are most of it.
        most = 1.5 if name in ("looking", "shifted", "between") else 1.2
        assert max(formula) <= most * max(predicted.partitions)
