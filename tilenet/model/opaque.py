"""A user module as the only layer of a network."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tilenet.model.dropout import MaskKey
from tilenet.model.dtypes import parameter_dtype
from tilenet.model.network import Network
from tilenet.model.origin import origin_under_way
from tilenet.random_keys import key


class OpaqueModule(nn.Module):
    """Runs a user module on windows (B, bands, H, W); returns its first map (B, classes, H, W).

    Batch norms keep their running statistics, and submodules that are in evaluation mode stay in
    it. Random numbers that the module draws in training from torch's default generators depend on
    the seed, the step and the crop, not on the rank.
    """

    def __init__(self, module: nn.Module, mask_key: MaskKey) -> None:
        super().__init__()
        parts = list(module.modules())
        # A module with all parts in evaluation mode counts as one in training.
        some_train = any(part.training for part in parts)
        self._fixed = [part for part in parts if some_train and not part.training]
        self._fixed += [p for p in parts if isinstance(p, nn.modules.batchnorm._BatchNorm)]
        self.module, self.mask_key = module, mask_key
        self.train()

    def train(self, mode: bool = True) -> "OpaqueModule":
        """Set the mode as `nn.Module.train` does; some submodules stay in evaluation mode."""
        super().train(mode)
        for part in self._fixed:
            part.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return first_map(self.module(x))
        origin, own = origin_under_way(), self.mask_key
        images = own.images if origin is None else origin.images
        devices = [] if x.device.type == "cpu" else [x.device]
        with torch.random.fork_rng(devices, device_type=x.device.type):
            torch.manual_seed(key(own.seed, "opaque", own.step, *images) % 2**63)
            return first_map(self.module(x))


def digest_of(module: nn.Module) -> str:
    """Digest of a module's parts: names, types and plain attributes; neither weights nor code."""
    digest = hashlib.blake2b(digest_size=16)
    for name, part in module.named_modules():
        digest.update(f"{name} {type(part).__qualname__}\n".encode())
        for option, value in sorted(vars(part).items()):
            if not option.startswith("_") and option != "training":
                digest.update(f"{option} {_text(value)}\n".encode(errors="replace"))
    return digest.hexdigest()


def _text(value: object) -> str:
    """Text of a number, a word, a function, or of lists of these; of others their type's name."""
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return str(getattr(value, "__qualname__", type(value).__qualname__))


def first_map(output: Any) -> Tensor:
    """The map in a module's output: the output itself, the first of several, or the entry `out`.

    Raises:
        TypeError: The output holds no map.
    """
    while not isinstance(output, Tensor):
        if isinstance(output, Mapping):
            output = output.get("out", next(iter(output.values()), None))
        elif isinstance(output, list | tuple) and output:
            output = output[0]
        else:
            raise TypeError(f"a network must return a map (it returned {type(output).__name__})")
    return output


def opaque_network(module: nn.Module, seed: int, precision: str) -> Network:
    """Build a network with the module as its only layer; the module is converted in place."""
    mask_key = MaskKey(seed=seed)
    network = Network([OpaqueModule(module, mask_key)], mask_key).to(parameter_dtype(precision))
    for parameter in network.parameters():
        # Fused optimizers take values in the order of memory, and gradients lie in a flat buffer.
        parameter.data = parameter.data.contiguous()
    return network
