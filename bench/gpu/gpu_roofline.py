"""Which share of a GPU's roofline the layers reach, kind by kind."""

import re
from dataclasses import replace

import torch

from bench.gpu.gpu_part import Asked, Figures
from bench.report import Found, at_least, at_most
from tilenet.errors import TilenetError
from tilenet.geometry.unet import PRESETS, UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.planning.machines.machine import Machine
from tilenet.planning.machines.read import known_machines, machine
from tilenet.planning.time.measured import measure_layers
from tilenet.planning.time.roofline import roofline

__all__ = ["facts_of", "machine_of", "shares"]

# NVIDIA, data sheets "H200 Tensor Core GPU" (2024) and "H100 Tensor Core GPU" (2023): the same die
# with other memory; 989 TFLOP/s in bfloat16 without sparsity.
H200 = replace(
    machine("summit"), name="h200", device="NVIDIA H200", devices_per_node=8,
    memory_bytes=141_000_000_000, memory_bandwidth=4.8e12, link_bandwidth=450e9, kernel_s=1e-5,
    flops={"float64": 34e12, "float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
)  # fmt: skip
H100 = replace(
    H200, name="h100", device="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30,
    memory_bandwidth=3.35e12,
)  # fmt: skip


def machine_of(device: str) -> Machine:
    """The machine whose device is called so, but for spaces and dashes; or of the same model.

    Raises:
        TilenetError: None has.
    """
    known = [machine(name) for name in known_machines() if name != "local"]
    known += [H100, H200]
    for same in (_plain, _model):
        for facts in known:
            if same(device) and same(device) == same(facts.device):
                return facts
    raise TilenetError(
        f"no machine has a device of that name ({device}; known: "
        f"{', '.join(facts.device for facts in known)}); name a machine by --machine"
    )


def _plain(device: str) -> str:
    return re.sub(r"nvidia|tesla|[^a-z0-9]", "", device.lower())


def _model(device: str) -> list[str]:
    return re.findall(r"\b[avh]\d{3,4}\b", device.lower())


def facts_of(asked: Asked) -> Machine:
    """The machine that was named, or the one that has this device."""
    if asked.machine or not asked.cuda:
        return machine(asked.machine or "local")
    return machine_of(torch.cuda.get_device_name(asked.device))


def shares(asked: Asked) -> Found:
    """Seconds of the roofline over measured ones, with the makers' peaks; and what is planned."""
    facts = facts_of(asked)
    peaks = replace(facts, maths_efficiency=1.0, memory_efficiency=1.0)
    options = PRESETS["small"] if asked.cuda else UNetOptions(2, base=4, norm="instance")
    size = 1024 if asked.cuda else 32
    layers = unet_layers(options)
    tables: Figures = {"machine": facts.name, "machine_device": facts.device, "size_px": size}
    claims = []
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    for precision in ("float32", "bfloat16"):
        if asked.late or precision not in facts.flops or not asked.computes(precision):
            continue
        network = build_network(layers, device=asked.device).train()
        image = torch.randn(1, options.bands, size, size, device=asked.device)
        seconds = {
            "measured_s": measure_layers(network, image, precision),
            "roofline_s": roofline(layers, size, size, precision, peaks),
            "planned_s": roofline(layers, size, size, precision, facts),
        }
        kinds: dict[str, Figures] = {}
        for key, times in seconds.items():
            for layer, one in zip(layers, times, strict=True):
                for kind in (layer.kind, "all"):
                    row = kinds.setdefault(kind, dict.fromkeys(seconds, 0.0))
                    row[key] += one.forward_s + one.backward_s
        for row in kinds.values():
            row["share"] = row["roofline_s"] / row["measured_s"]
        tables[precision] = kinds
        most = max(row["share"] for row in kinds.values())
        of = f"{precision}: share of the roofline"
        claims += [
            at_least(f"{of} that convolutions reach (planned with 0.6)",
                     kinds["conv"]["share"], 0.6),
            at_most(f"{of} of the kind of layer that reaches most", most, 1.0),
        ]  # fmt: skip
    return tables, claims if asked.cuda else []
