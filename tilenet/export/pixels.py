"""A network that takes pixels as files hold them, as one module."""

import torch
from torch import Tensor, nn

from tilenet.storage.network_json import NetworkRecord


class FromPixels(nn.Module):
    """Maps pixel values (B, bands, H, W) to logits or probabilities (B, classes, H′, W′).

    It standardises as `model.inputs.standardise` does, to the bit where its dtype holds all values
    of the image's: differences of 1 between whole numbers beyond 2²⁴ are lost here. It does not
    know which pixels hold no data.

    Args:
        network: Network on standardised pixels; taken over, in evaluation mode.
        dtype: dtype of the network, the pixels and the output.
        softmax: Whether it returns probabilities.
    """

    shift: Tensor
    rest: Tensor
    scale: Tensor

    def __init__(
        self, network: nn.Module, record: NetworkRecord, dtype: torch.dtype, *, softmax: bool
    ) -> None:
        super().__init__()
        mean = torch.tensor(record.mean, dtype=torch.float64)
        scale = [deviation if deviation > 0 else 1.0 for deviation in record.std]
        shift = mean.to(dtype)
        self.register_buffer("shift", shift[:, None, None])
        self.register_buffer("rest", (mean - shift).to(dtype)[:, None, None])
        self.register_buffer("scale", torch.tensor(scale, dtype=dtype)[:, None, None])
        self.network, self.softmax = network, softmax
        self.eval().requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.network((pixels - self.shift - self.rest) / self.scale)
        return logits.softmax(dim=1) if self.softmax else logits
