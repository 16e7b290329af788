"""Run files that name a user module: what does not go with it, in sentences."""

from typing import Any

import pytest

from tilenet.errors import TilenetError
from tilenet.training.config.keys import NetworkKeys
from tilenet.training.setup.architecture import Architecture


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"module": "zoo:network", "base": 8}, r"a user module, .*network.base: 8"),
        ({"weights": "w.pth"}, r"a user module, .*module: None, network.weights: w.pth"),
        ({"module": "a:b", "mean": [1.0]}, r"network.mean: \[1.0\], network.std: None"),
        ({"module": "a:b", "mean": [1.0], "std": [0.0]}, r"std above 0"),
        ({"module": "a:b", "mean": [float("nan")], "std": [1.0]}, r"give both, or none"),
    ],
)
def test_keys_that_contradict_each_other(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(TilenetError, match=said):
        NetworkKeys(**keys).check()
    NetworkKeys(module="zoo:network", mean=[1.0], std=[2.0]).check()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"module": "zoo"}, r"is named package:function or package:Class \(zoo\)"),
        ({"module": "zoo:nothing"}, r"zoo:nothing: AttributeError"),
        ({"module": "nowhere_to_be_found:net"}, r"ModuleNotFoundError"),
        ({"module": "zoo:Residual", "options": {"depth": 3}}, r"TypeError.*depth"),
        ({"module": "builtins:dict"}, r"is a torch.nn.Module \(builtins:dict gives dict\)"),
        ({"module": "sys:exit"}, r"SystemExit"),
        ({"module": "zoo:Gated"}, r"one channel per class .* gives 3, classes: 4"),
        ({"module": "zoo:Residual", "weights": "/nowhere/w.pth"}, r"FileNotFoundError"),
        (
            {"module": "zoo:Residual", "mean": [1.0], "std": [1.0]},
            r"each band has a mean and a std .*bands: 3",
        ),
    ],
)
def test_modules_that_cannot_be_trained(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(TilenetError, match=said) as caught:
        Architecture.of(NetworkKeys(**keys), 3, 4, 0)
    assert "\n" not in str(caught.value)


def test_all_ranks_make_the_same_first_weights() -> None:
    keys = NetworkKeys(module="zoo:Residual")
    states = []
    for seed in (5, 5, 6):
        adopted = Architecture.of(keys, 3, 4, seed).adopted
        assert adopted is not None
        states.append(adopted.state["head.weight"])
    assert states[0].equal(states[1])
    assert not states[0].equal(states[2])


def test_a_module_without_weights_is_not_trained() -> None:
    options = {"kernel_size": 3, "stride": 1, "padding": 1}
    with pytest.raises(TilenetError, match=r"torch\.nn:AvgPool2d trains none"):
        Architecture.of(NetworkKeys(module="torch.nn:AvgPool2d", options=options), 3, 3, 0)
