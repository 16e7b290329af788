"""Refuse keys that nothing in the run reads: who sets one expects that it changes the run."""

from dataclasses import fields
from operator import attrgetter
from typing import Any

from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.errors import TilenetError

OF_VECTORS = " ".join(f"vectors.{key.name}" for key in fields(VectorKeys))

# A key, its values with which others are read (none: any but 0), and those others.
READ_WITH: list[tuple[str, tuple[str, ...], str]] = [
    ("optimizer.name", ("sgd",), "optimizer.momentum optimizer.nesterov"),
    ("optimizer.momentum", (), "optimizer.nesterov"),
    ("schedule.name", ("poly",), "schedule.power"),
    ("schedule.name", ("step",), "schedule.milestones schedule.factor"),
    ("schedule.name", ("poly", "cosine", "step"), "schedule.min_lr"),
    ("task", ("regression",), "unit"),
    ("task", ("classification",), f"ignore_index class_weights oversample {OF_VECTORS}"),
    ("loss", ("focal",), "focal_gamma"),
    ("loss", ("huber",), "huber_delta"),
    ("network.norm", ("group",), "network.groups"),
    ("network.norm", ("batch", "group", "instance"), "network.norm_scope"),
    ("crop_px", (), "oversample"),
    ("validation.share", (), "validation.block_px"),
    ("swap", ("auto", "all"), "swapping.min_mib swapping.host_gib swapping.folder"),
]


def check_unread(run: Any) -> None:
    """Refuse keys that are not read and have another value than their default.

    Args:
        run: A `RunFile`, of a module that imports this one.

    Raises:
        TilenetError: The error names the first of them.
    """
    for other, values, names in READ_WITH:
        choice, _ = _value_and_default(run, other)
        if choice in values or (choice and not values):
            continue
        needed = f"{other}: {' or '.join(values)}" if values else other
        for name in names.split():
            value, default = _value_and_default(run, name)
            if value != default and (value or default):  # [] says none, as None does
                raise TilenetError(
                    f"{name} is read only with {needed} ({name}: {value}, {other}: {choice}); set "
                    f"{needed}, or leave {name} out"
                )


def _value_and_default(run: Any, name: str) -> tuple[Any, Any]:
    group, _, key = name.rpartition(".")
    keys = attrgetter(group)(run) if group else run
    default = getattr(run.network.start if group == "network" else type(keys), key)
    value = getattr(keys, key)
    return (default if value is None else value), default
