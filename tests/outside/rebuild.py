"""Rebuild a network from its checkpoint and run it, as docs/checkpoint.md says and no other way."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

NORM_EPS = 1e-5


@dataclass(frozen=True)
class Checkpoint:
    """`network.json` as it stands, and the tensors of `weights.safetensors` in float64."""

    network: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The layers, in the order in which they run."""
        layers: list[dict[str, Any]] = self.network["layers"]
        return layers


@dataclass(frozen=True)
class Image:
    """A whole image."""

    pixels: NDArray[np.float64]  # (C, H, W)
    valid: NDArray[np.bool_]  # (H, W)


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint and check that its parts fit each other."""
    network = json.loads((folder / "network.json").read_text())
    tensors = read_safetensors(folder / "weights.safetensors")
    if network["format"] != "tilenet-network-1":
        raise SystemExit(f"{folder}: unknown format {network['format']}")
    if network["resolution"] is not None:
        raise SystemExit(f"{folder}: this program reads images at their own resolution only")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wanted = tensor_shapes(network["layers"])
    if shapes != wanted:
        wrong = sorted(dict(shapes.items() ^ wanted.items()))
        raise SystemExit(f"{folder}: tensors do not fit the layers: {', '.join(wrong)}")
    stride = total_stride(network["layers"])
    if network["alignment_px"] != stride:
        raise SystemExit(f"{folder}: alignment_px is not the layers' total stride, {stride}")
    return Checkpoint(network, {name: tensor.double() for name, tensor in tensors.items()})


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a file: 8 bytes with the header's length, a JSON header, raw bytes."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    dtypes = {"F64": "<f8", "F32": "<f4", "I64": "<i8"}
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        values = np.frombuffer(data[start + first : start + end], dtypes[entry["dtype"]])
        tensors[name] = torch.from_numpy(values.reshape(entry["shape"]).copy())
    return tensors


# Pixels in, logits out


def whole_image(checkpoint: Checkpoint, image: Image, seed: int | None = None) -> Tensor:
    """Logits (K, H, W) of all pixels at once.

    Args:
        seed: Of the run, for its first training step; None: as maps are made.
    """
    network, layers = checkpoint.network, checkpoint.layers
    statistics = network["statistics"]
    mean = np.array(statistics["mean"])[:, None, None]
    std = np.array([s if s > 0 else 1.0 for s in statistics["std"]])[:, None, None]
    seen = np.where(image.valid, (image.pixels - mean) / std, 0.0)
    crop = []
    for dim, pixels in (1, seen.shape[1]), (2, seen.shape[2]):
        before, count = read_window(pixels, network)
        seen = seen.take(reflected(-before, count, pixels), axis=dim)
        offset = (count - (output_size(layers, count) or 0)) // 2
        if offset != network["offset_px"]:
            raise SystemExit(f"offset_px is not half of what the network loses, {offset}")
        crop.append(slice(before - offset, before - offset + pixels))
    logits = run(checkpoint, torch.from_numpy(seen)[None], seed)
    return logits[0, :, crop[0], crop[1]]


def read_window(pixels: int, network: dict[str, Any]) -> tuple[int, int]:
    """Pixels read before an image of so many, and altogether, along one axis."""
    unit: int = network["alignment_px"]
    extended = -(-pixels // unit) * unit
    if network["padding"] == "same":
        return 0, extended
    halo: int = network["halo_px"]
    needed = halo - network["offset_px"] + extended
    smallest = extended + 2 * halo
    for count in range(smallest, smallest + 2 * unit):
        if (output_size(network["layers"], count) or 0) >= needed:
            return halo, count
    raise SystemExit(f"the network takes no size from {smallest} px on")


def reflected(first: int, count: int, pixels: int) -> list[int]:
    """Pixels seen at `first`, `first` + 1 … of an image mirrored at the centres of its edge pixels.

    Walks like a ball between two walls: no formula that could share another one's mistake.
    """
    place, step = 0, 1
    seen = []
    for _ in range(-first if first < 0 else 0):  # to the left, which mirrors the way to the right
        place, step = bounced(place, step, pixels)
    step = -step
    for _ in range(count):
        seen.append(place)
        place, step = bounced(place, step, pixels)
    return seen


def bounced(place: int, step: int, pixels: int) -> tuple[int, int]:
    """The next place of the walk and its direction."""
    if pixels == 1:
        return 0, step
    if not 0 <= place + step < pixels:
        step = -step
    return place + step, step


def run(checkpoint: Checkpoint, x: Tensor, seed: int | None) -> Tensor:
    """Run the layers, (1, bands, H, W) to (1, K, H′, W′); with a seed as in a first step."""
    stashed: dict[str, Tensor] = {}
    for place, layer in enumerate(checkpoint.layers):
        weight = checkpoint.tensors.get(f"{place}.weight")
        bias = checkpoint.tensors.get(f"{place}.bias")
        match layer["kind"]:
            case "conv":
                assert weight is not None
                stride, padding, dilation = layer["stride"], layer["padding"], layer["dilation"]
                x = F.conv2d(x, weight, bias, stride, padding, dilation)
            case "transposed":
                assert weight is not None
                stride, padding = layer["stride"], layer["padding"]
                x = F.conv_transpose2d(x, weight, bias, stride, padding, layer["output_padding"])
            case "pool":
                pool = F.max_pool2d if layer["mode"] == "max" else F.avg_pool2d
                x = pool(x, layer["kernel"], layer["stride"], layer["padding"])
            case "upsample" if layer["mode"] == "nearest":
                factor = layer["factor"]
                x = x.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)
            case "upsample":
                x = F.interpolate(
                    x, scale_factor=layer["factor"], mode="bilinear", align_corners=False
                )
            case "norm":
                x = normalised(checkpoint, place, x, training=seed is not None)
            case "dropout":
                if seed is not None:
                    x = x * dropout_mask(layer["probability"], x.shape[1], seed, place)
            case "activation":
                x = F.leaky_relu(x, layer["slope"])
            case "stash":
                stashed[layer["name"]] = x
            case "pop":
                x = joined(x, stashed.pop(layer["name"]), layer["fit"])
            case kind:
                raise SystemExit(f"layer {place} is of an unknown kind, {kind}")
    return x


def normalised(checkpoint: Checkpoint, place: int, x: Tensor, *, training: bool) -> Tensor:
    """(x − mean) / √(variance + 10⁻⁵), then times weight, plus bias, where there are such."""
    layer, tensors = checkpoint.layers[place], checkpoint.tensors
    channels = x.shape[1]
    if layer["norm"] == "batch" and not training:
        mean = tensors[f"{place}.running_mean"][:, None, None]
        variance = tensors[f"{place}.running_var"][:, None, None]
    else:
        # With one image a batch's statistics are those of each of its channels.
        groups = layer["groups"] if layer["norm"] == "group" else channels
        parts = x.reshape(groups, -1)
        mean = parts.mean(dim=1).repeat_interleave(channels // groups)[:, None, None]
        variance = parts.var(dim=1, unbiased=False)
        variance = variance.repeat_interleave(channels // groups)[:, None, None]
    x = (x - mean) / (variance + NORM_EPS).sqrt()
    if layer["affine"]:
        weight, bias = tensors[f"{place}.weight"], tensors[f"{place}.bias"]
        x = x * weight[:, None, None] + bias[:, None, None]
    return x


def dropout_mask(probability: float, channels: int, seed: int, layer: int) -> Tensor:
    """Factors (C, 1, 1) of a layer's channels, for image 0 in step 0."""
    text = f"{seed},dropout,0,0,{layer}"
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    uniform = (np.random.Philox(key=key).random_raw(channels) >> np.uint64(11)) / 2.0**53
    return torch.from_numpy((uniform >= probability) / (1 - probability))[:, None, None]


def joined(x: Tensor, skip: Tensor, fit: str) -> Tensor:
    """`x` and the stashed map as one, along the channels."""
    rows, cols = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
    if fit == "crop":
        skip = skip[:, :, rows // 2 :, cols // 2 :][:, :, : x.shape[2], : x.shape[3]]
    else:
        x = F.pad(x, (0, cols, 0, rows))
    return torch.cat((x, skip), dim=1)


# What follows from the layers


def tensor_shapes(layers: list[dict[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that the layers have."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place, layer in enumerate(layers):
        wide, out = layer["in_channels"], layer["out_channels"]
        if layer["kind"] in ("conv", "transposed"):
            ends = (out, wide) if layer["kind"] == "conv" else (wide, out)
            shapes[f"{place}.weight"] = (*ends, layer["kernel"], layer["kernel"])
            if layer["bias"]:
                shapes[f"{place}.bias"] = (out,)
        if layer["kind"] == "norm":
            if layer["affine"]:
                shapes |= {f"{place}.weight": (out,), f"{place}.bias": (out,)}
            if layer["norm"] == "batch":
                shapes |= {f"{place}.running_mean": (out,), f"{place}.running_var": (out,)}
                shapes[f"{place}.num_batches_tracked"] = ()
    return shapes


def total_stride(layers: list[dict[str, Any]]) -> int:
    """Input pixels between neighbouring cells of the coarsest map."""
    stride = coarsest = 1
    for layer in layers:
        if layer["kind"] in ("conv", "pool"):
            stride *= layer["stride"]
        elif layer["kind"] in ("transposed", "upsample"):
            stride //= layer["factor"] if layer["kind"] == "upsample" else layer["stride"]
        coarsest = max(coarsest, stride)
    return coarsest


def output_size(layers: list[dict[str, Any]], cells: int) -> int | None:
    """Output cells along an axis; None where a remainder is dropped or a skip cut unevenly."""
    stashed = {}
    for layer in layers:
        if layer["kind"] in ("conv", "pool"):
            reach = (layer["kernel"] - 1) * layer.get("dilation", 1)
            room = cells + 2 * layer["padding"] - reach - 1
            if room < 0 or room % layer["stride"]:
                return None
            cells = room // layer["stride"] + 1
        elif layer["kind"] == "transposed":
            cells = (cells - 1) * layer["stride"] + layer["kernel"] + layer["output_padding"]
            cells -= 2 * layer["padding"]
        elif layer["kind"] == "upsample":
            cells *= layer["factor"]
        elif layer["kind"] == "stash":
            stashed[layer["name"]] = cells
        elif layer["kind"] == "pop":
            other = stashed.pop(layer["name"])
            if other < cells or (other - cells) % 2:
                return None
    return cells
