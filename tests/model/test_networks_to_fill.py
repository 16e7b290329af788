"""Networks whose weights are still to be loaded."""

import torch

from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.model.network import build_network, network_to_fill


def test_they_have_every_tensor_of_the_network() -> None:
    """On the CPU, each with its dtype and trained as there."""
    layers = unet_layers(UNetOptions(poolings=2, base=4, norm="batch", norm_scope="tile"))
    empty, wanted = (
        make(layers, dtype=torch.float64).state_dict(keep_vars=True)
        for make in (network_to_fill, build_network)
    )
    assert {name.rpartition(".")[2] for name in wanted} >= {"weight", "running_var"}
    assert list(empty) == list(wanted)
    for name, tensor in empty.items():
        other = wanted[name]
        assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
        assert (type(tensor), tensor.requires_grad) == (type(other), other.requires_grad)
        assert tensor.device.type == "cpu"
