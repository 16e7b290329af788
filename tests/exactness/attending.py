"""A network that no list of layers can say: every cell looks at all others of its window."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Attending", "channels_last", "network"]


class Attending(nn.Module):
    """Patches of 4 × 4 px, attention over all of them, and a map; (B, 3, H, W) to (B, 3, H, W).

    It gives a map and something else, as networks with a deep head do.
    """

    positions: Tensor

    def __init__(self, window_px: int = 32, drop: float = 0.3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=drop, batch_first=True)
        self.after = nn.LayerNorm(8)
        self.drop = nn.Dropout(drop)
        self.head = nn.Conv2d(8, 3, 1)
        ramp = torch.linspace(-1, 1, (window_px // 4) ** 2)[:, None] * torch.arange(1, 9) / 8
        self.register_buffer("positions", ramp, persistent=False)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.stem(image))
        cells = x.flatten(2).mT + self.positions
        attended, _ = self.attention(cells, cells, cells)
        cells = self.drop(self.after(cells + attended))
        deep = self.head(cells.mT.reshape(x.shape))
        return F.interpolate(deep, image.shape[2:], mode="bilinear"), deep


def network(window_px: int = 32, drop: float = 0.3, seed: int = 4) -> Attending:
    """With weights and statistics that mean something."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Attending(window_px, drop)
        for values in (module.norm.running_mean, module.norm.running_var):
            assert values is not None
            values.uniform_(0.5, 1.5)
    return module


def channels_last(window_px: int = 32) -> Attending:
    """The same, whose weights lie otherwise in memory."""
    return network(window_px).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
