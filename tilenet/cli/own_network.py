"""A user module that a command names: built, adopted, and in numbers."""

import json
import sys
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections import Counter
from pathlib import Path
from typing import Any

from torch import nn

from tilenet.adoption.adopt import Adopted, adopt
from tilenet.adoption.source import build_module, check_name
from tilenet.adoption.weights import load_partial_weights
from tilenet.errors import TilenetError, UsageError

WHOLE_IMAGE = (
    "It takes averages or statistics of the whole image, which no halo covers: they are summed "
    "over ranks."
)
BANDS = 3  # of the image, where the command names none


def add_code(parser: ArgumentParser) -> _ArgumentGroup:
    """Options that name the module of a checkpoint that holds weights alone."""
    own = parser.add_argument_group("your own network")
    own.add_argument(
        "--network",
        dest="code",
        metavar="PACKAGE:NAME",
        help="what makes the module of a checkpoint of halo_mode: windows, which holds no code",
    )
    own.add_argument("--options", nargs="*", metavar="NAME=VALUE", help="what it is called with")
    return own


def adopt_named(options: Namespace) -> tuple[nn.Module, Adopted]:
    """The module that a command names, and its list of layers.

    Raises:
        UsageError: The name is not package:name, or an option not name=value.
        TilenetError: It cannot be made or cut into tiles, or the weights are of another one.
    """
    module = module_named(options.network, options.options, options.weights)
    bands = BANDS if options.bands is None else options.bands
    return module, adopt(module, bands, options.batch_norm or "frozen")


def module_named(network: str, options: list[str] | None, weights: str | None) -> nn.Module:
    """The module that a function or class makes, with weights of a file.

    Raises:
        UsageError: The name is not package:name, or an option not name=value.
        TilenetError: It cannot be made, or the weights are of another one.
    """
    values = dict(_option(option) for option in options or [])
    try:
        check_name(network)
    except TilenetError as error:
        raise UsageError(str(error)) from error
    module = build_module(network, values)
    if weights is not None:
        print(f"tilenet: {load_partial_weights(module, Path(weights))}", file=sys.stderr)
    return module


def facts_of(adopted: Adopted) -> dict[str, Any]:
    """Return facts on a network: its size, its kinds of layers and its context."""
    context = adopted.context
    return {
        "network": adopted.name,
        "bands": adopted.bands,
        "classes": adopted.classes,
        "num_layers": len(adopted.layers),
        "num_parameters": adopted.num_parameters,
        "kinds": dict(Counter(layer.kind for layer in adopted.layers).most_common()),
        "alignment_px": context.alignment_px,
        "context_aligned_px": context.context_aligned_px,
        "context_any_pixel_px": context.context_any_pixel_px,
        "halo_px": context.halo_px,
        "looks_at_whole_image": adopted.looks_at_all,
    }


def _option(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise UsageError(f"an option is name=value (--options: {text})")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
