"""Layers as JSON: the kind of each, and its fields."""

from dataclasses import asdict, fields
from typing import Any

from tilenet.errors import TilenetError
from tilenet.geometry.coordinates import Coordinates
from tilenet.geometry.layers import (
    Activation,
    Cellwise,
    Conv,
    Dropout,
    Expand,
    GlobalPool,
    Join,
    Layer,
    Norm,
    Pool,
    Stash,
    TransposedConv,
    Upsample,
)
from tilenet.geometry.opaque import Opaque

KINDS: dict[str, type[Layer]] = {
    kind.kind: kind
    for kind in (
        Conv, TransposedConv, Pool, Upsample, Norm, Dropout, Activation, Cellwise, Stash, Join,
        GlobalPool, Expand, Coordinates, Opaque,
    )
}  # fmt: skip


def layer_to_json(layer: Layer) -> dict[str, Any]:
    """The layer as a plain dictionary; `kind` names its class.

    A join of the map with one stashed map behind it is a `pop`, as in checkpoints before there were
    other joins: programs that read these go on reading U-Nets.
    """
    match layer:
        case Join(wide, out, (name,), "concatenate", 0, fit):
            channels = {"in_channels": wide, "out_channels": out}
            return {"kind": "pop", **channels, "name": name, "fit": fit}
    return {"kind": layer.kind, **asdict(layer)}


def layer_from_json(entry: dict[str, Any]) -> Layer:
    """The layer that `layer_to_json` wrote, also before a kind had all of its fields.

    Raises:
        TilenetError: The entry is not a layer that this version knows.
    """
    values: dict[str, Any] = {key: value for key, value in entry.items() if key != "kind"}
    if entry.get("kind") == "pop" and "name" in values:
        entry, values["kept"] = {"kind": "join"}, [values.pop("name")]
    kind = KINDS.get(str(entry.get("kind")))
    required = {"in_channels", "out_channels"}
    if kind is None or not required <= set(values) <= {field.name for field in fields(kind)}:
        raise TilenetError(
            f"a layer must have a known kind and that kind's fields (got {entry!r:.200}); "
            f"known kinds: {', '.join(KINDS)}"
        )
    return kind(**{key: _frozen(value) for key, value in values.items()})


def _frozen(value: Any) -> Any:
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value
