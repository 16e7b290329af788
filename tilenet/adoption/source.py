"""Somebody's module: made by a function or a class of their package, with weights from a file."""

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tilenet.errors import TilenetError, one_line

__all__ = ["check_name", "fill_in", "made"]

MOST_NAMED = 3  # names that a sentence holds


def check_name(network: str) -> None:
    """Refuse what names no function or class of a package.

    Raises:
        TilenetError: With the form.
    """
    package, sign, name = network.partition(":")
    if not (sign and all(part.isidentifier() for part in [*package.split("."), *name.split(".")])):
        raise TilenetError(
            f"a network is named package:function or package:Class ({network}); for instance "
            "segmentation_models_pytorch:Unet"
        )


def made(network: str, options: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """The module that a function or class makes, looked for in the working directory too.

    Args:
        network: As in `package:function` or `package:Class`.
        options: What it is called with.
        seed: Of torch's random numbers while it is called.

    Raises:
        TilenetError: There is none, it raises, or it makes no module.
    """
    check_name(network)
    package, _, name = network.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    dtype = torch.get_default_dtype()
    try:
        maker: Any = import_module(package)
        for part in name.split("."):
            maker = getattr(maker, part)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = maker(**options)
    except (Exception, SystemExit) as error:  # whatever somebody's code may raise
        raise TilenetError(
            f"a network is made by calling a function or a class ({network}: "
            f"{type(error).__name__}: {one_line(str(error))}); try it in Python first"
        ) from error
    finally:
        torch.set_default_dtype(dtype)  # which an import may change, and other ranks keep
    if not isinstance(module, nn.Module):
        raise TilenetError(
            f"a network is a torch.nn.Module ({network} gives {type(module).__name__}); name "
            "what makes one"
        )
    return module


def fill_in(module: nn.Module, path: Path) -> str:
    """Fill in weights of a file, of the whole module or of one part of it, such as its encoder.

    Returns:
        A sentence on what was filled in.

    Raises:
        TilenetError: The file cannot be read, a shape differs, or less than half of the file's
            weights have a place in the module.
    """
    found = _read(path)
    wanted = module.state_dict()
    prefix = max(_prefixes(wanted), key=lambda one: _fitting(one, found, wanted))
    places = {f"{prefix}{name}": tensor for name, tensor in found.items()}
    placed = {name: tensor for name, tensor in places.items() if name in wanted}
    if 2 * len(placed) < len(found) or not placed:
        raise TilenetError(
            f"weights belong to the network ({path} holds {len(found)}, such as "
            f"{_some(found)}, of which {len(placed)} have a place; the network has {_some(wanted)} "
            "and so on); name weights of the same network, or of a part of it"
        )
    for name, tensor in placed.items():
        if tensor.shape != wanted[name].shape:
            raise TilenetError(
                f"weights have the shapes of the network's ({path}: {name} is "
                f"{tuple(tensor.shape)} there and {tuple(wanted[name].shape)} in the network); use "
                "weights that were trained with as many bands and classes, or leave this one out "
                "of the file"
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise TilenetError(
                f"weights are finite numbers ({path}: {name} holds others); use another file"
            )
    module.load_state_dict(placed, strict=False)
    left = sorted(set(places) - set(placed))
    part = f" of {prefix.removesuffix('.')}" if prefix else ""
    return (
        f"{path}: {len(placed)} of {len(wanted)} weights and buffers of the network are filled in"
        f"{part}" + (f"; {len(left)} of the file have no place ({_some(left)})" if left else "")
    )


def _read(path: Path) -> dict[str, Tensor]:
    """Tensors of a file, by name; a file of torch's may hold them under `state_dict` or `model`."""
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds
        raise TilenetError(
            f"weights are a file of safetensors, or of torch.save without code ({path}: "
            f"{type(error).__name__}: {one_line(str(error))[:200]}); save its state_dict() again"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
    found = dict(held) if isinstance(held, Mapping) else {}
    if not found or not all(isinstance(one, Tensor) for one in found.values()):
        raise TilenetError(
            f"a file of weights holds tensors by their names ({path}: {type(held).__name__}); save "
            "module.state_dict()"
        )
    return found


def _prefixes(wanted: Mapping[str, Tensor]) -> list[str]:
    """Names of all submodules with a dot behind; first that of the module itself, none."""
    parts = {"": None}
    for name in wanted:
        words = name.split(".")
        parts |= {".".join(words[:end]) + ".": None for end in range(1, len(words))}
    return list(parts)


def _fitting(prefix: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> int:
    return sum(f"{prefix}{name}" in wanted for name in found)


def _some(names: Any) -> str:
    shown = list(names)[:MOST_NAMED]
    return ", ".join(shown) or "none"
