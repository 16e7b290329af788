"""The modules of the bench `brought`, as run files name them."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from bench.exactness.networks import declare_operators


def resnet18() -> nn.Module:
    """A U-Net with a ResNet-18."""
    return _smp("Unet", encoder_name="resnet18")


def segformer() -> nn.Module:
    """SegFormer with the smallest encoder."""
    return _smp("Segformer", encoder_name="mit_b0")


def swin() -> nn.Module:
    """UPerNet with a Swin Transformer."""
    return _smp("UPerNet", encoder_name="tu-swin_tiny_patch4_window7_224", img_size=192)


def lite() -> nn.Module:
    """EfficientNet-Lite0 with ImageNet's weights under a small pyramid."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
    module: nn.Module = import_module("lite_unet").LiteUNet(classes=2)
    return module


def _smp(name: str, **options: Any) -> nn.Module:
    declare_operators()
    maker = getattr(import_module("segmentation_models_pytorch"), name)
    module: nn.Module = maker(encoder_weights=None, in_channels=3, classes=2, **options)
    return module
