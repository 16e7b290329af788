"""Layers of checkpoints before there were cellwise ones: scales, channel norms, activations."""

from typing import Any

from tilenet.geometry.layers import Cellwise, Step

__all__ = ["as_cellwise"]

MAP = "value", 0
RECTIFIERS = "leaky_relu", "relu", "relu6"


def as_cellwise(entry: dict[str, Any]) -> Cellwise | None:
    """The cellwise layer of an entry of `network.json`; None: it is of another kind.

    Weights keep their names. The entry may hold anything else.
    """
    try:
        wide = int(entry["in_channels"])
        match entry.get("kind"):
            case "scale":
                weights, steps = _scale(entry, wide)
            case "channel_norm":
                weights, steps = _channel_norm(entry, wide)
            case "activation" if entry.get("function", "leaky_relu") not in RECTIFIERS:
                weights, steps = (), (_function(str(entry["function"])),)
            case _:
                return None
        return Cellwise(wide, int(entry["out_channels"]), weights=weights, steps=steps)
    except (KeyError, TypeError, ValueError):
        return None


Weights = tuple[tuple[str, tuple[int, ...], bool], ...]


def _scale(entry: dict[str, Any], wide: int) -> tuple[Weights, tuple[Step, ...]]:
    names = [name for name in ("weight", "bias") if entry.get(name)]
    weights = tuple((name, (wide,), bool(entry.get("trained", True))) for name in names)
    steps: list[Step] = [
        ("mul.Tensor", MAP, float(entry.get("factor", 1.0))),
        ("add.Tensor", ("value", 1 + len(names)), float(entry.get("offset", 0.0))),
    ]
    for number, name in enumerate(names):
        last = ("value", len(names) + len(steps))
        steps.append(("reshape.default", ("value", 1 + number), ("list", wide, 1, 1)))
        each = ("value", len(names) + len(steps))
        steps.append(("mul.Tensor" if name == "weight" else "add.Tensor", last, each))
    return weights, tuple(steps)


def _channel_norm(entry: dict[str, Any], wide: int) -> tuple[Weights, tuple[Step, ...]]:
    affine, epsilon = bool(entry.get("affine", True)), float(entry.get("epsilon", 1e-5))
    weights: Weights = (("weight", (wide,), True), ("bias", (wide,), True)) if affine else ()
    own = [("value", 1), ("value", 2)] if affine else [None, None]
    first = 1 + len(weights)
    return weights, (
        ("permute.default", MAP, ("list", 0, 2, 3, 1)),
        ("layer_norm.default", ("value", first), ("list", wide), *own, epsilon),
        ("permute.default", ("value", first + 1), ("list", 0, 3, 1, 2)),
    )


def _function(name: str) -> Step:
    match name:
        case "channel_softmax":
            return "softmax.int", MAP, 1
        case "gelu_tanh":
            return "gelu.default", MAP, ("named", "approximate", "tanh")
    return f"{name}.default", MAP
