"""Segmentation networks of libraries, as users bring them; chosen by what people use."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bench.exactness.networks import DECODERS, SMP, Choice

__all__ = ["Listed", "load_torchgeo", "networks_of_libraries"]

BANDS, CLASSES = 4, 5
SIZE_PX = 128, 256  # the first size at which adopting records a network
TORCHVISION = (
    "fcn_resnet50", "fcn_resnet101", "deeplabv3_resnet50", "deeplabv3_resnet101",
    "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large",
)  # fmt: skip
# Encoders under a U-Net, and those of them that meet each other decoder too.
SMP_ENCODERS = (
    "resnet18", "resnet34", "resnet50", "resnext50_32x4d", "dpn68", "vgg11_bn", "vgg16",
    "se_resnet50", "se_resnext50_32x4d", "densenet121", "inceptionresnetv2", "inceptionv4",
    "efficientnet-b0", "efficientnet-b3", "mobilenet_v2", "xception", "timm-efficientnet-b0",
    "timm-tf_efficientnet_lite0", "timm-skresnet18", "mobileone_s0", "mit_b0", "tu-resnet18",
    "tu-regnety_002", "tu-convnext_tiny", "tu-convnextv2_atto", "tu-mobilenetv3_large_100",
    "tu-hrnet_w18_small", "tu-resnest14d", "tu-ghostnet_100", "tu-tf_efficientnetv2_b0",
    "tu-edgenext_xx_small", "tu-maxvit_tiny_rw_224",
)  # fmt: skip
SPREAD = "resnet34", "efficientnet-b0", "mobilenet_v2", "timm-skresnet18", "tu-regnety_002"
WITHOUT_STRIDES = "tu-convnext_tiny", "mit_b0"  # which these decoders take besides
MORE = {
    "UnetPlusPlus": ("densenet121",), "Linknet": ("vgg11_bn",), "FPN": WITHOUT_STRIDES,
    "PSPNet": WITHOUT_STRIDES, "PAN": ("resnext50_32x4d",), "DeepLabV3": ("se_resnet50",),
    "DeepLabV3Plus": ("resnext50_32x4d",), "Segformer": WITHOUT_STRIDES,
    "UPerNet": (*WITHOUT_STRIDES, "tu-swin_tiny_patch4_window7_224"),
}  # fmt: skip
# Models of timm, whose maps a small head of the bench takes.
TIMM = (
    "resnet18", "resnet50", "resnet50d", "resnext26ts", "resnext50_32x4d", "wide_resnet50_2",
    "seresnet50", "ecaresnet26t", "gcresnet33ts", "skresnet18", "resnetv2_50", "resnetv2_50x1_bit",
    "resnetv2_50d_gn", "resnetaa50", "resnetblur50", "res2net50_26w_4s", "resnest14d", "tresnet_m",
    "regnetx_002", "regnety_002", "regnetz_b16", "efficientnet_b0", "efficientnetv2_rw_t",
    "tf_efficientnet_b0", "tf_efficientnetv2_s", "efficientnet_lite0", "mobilenetv2_100",
    "mobilenetv3_large_100", "mobilenetv4_conv_small", "mnasnet_100", "fbnetc_100", "fbnetv3_b",
    "mixnet_s", "tinynet_a", "hardcorenas_a", "lcnet_100", "spnasnet_100", "rexnet_100",
    "ghostnet_100", "ghostnetv2_100", "mobileone_s0", "repvgg_a0", "repvit_m0_9", "repghostnet_100",
    "gernet_s", "convnext_tiny", "convnext_atto", "convnextv2_atto", "inception_next_atto",
    "densenet121", "dla34", "hrnet_w18_small", "hrnet_w18", "cspresnet50", "cspdarknet53",
    "cs3darknet_s", "dpn68", "selecsls42b", "nf_resnet50", "nfnet_l0", "dm_nfnet_f0",
    "eca_nfnet_l0", "ese_vovnet19b_dw", "vovnet39a", "vgg11", "vgg16_bn", "xception41",
    "legacy_xception", "inception_v3", "inception_v4", "hgnetv2_b0", "fasternet_t0", "starnet_s1",
    "mambaout_femto", "convformer_s18", "poolformer_s12", "edgenext_xx_small",
)  # fmt: skip
# They look at other pixels by softmax, or in windows.
TIMM_ATTENTION = (
    "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224", "pvt_v2_b0", "mobilevit_xxs",
    "maxvit_tiny_rw_224", "efficientformerv2_s0", "efficientvit_m0",
)  # fmt: skip
ATTENTION = ("mit_b", "swin", "maxvit", "vit_tiny", "coat")  # in an encoder's name
PLAIN = {"spatial_dims": 2, "in_channels": BANDS, "out_channels": CLASSES}
LEVELS = {"channels": (8, 16, 32, 64), "strides": (2, 2, 2)}
KERNELS: dict[str, Any] = {
    "kernel_size": [3, 3, 3, 3], "strides": [1, 2, 2, 2], "upsample_kernel_size": [2, 2, 2],
}  # fmt: skip
MONAI: dict[str, tuple[str, dict[str, Any]]] = {
    "UNet": ("UNet", {**PLAIN, **LEVELS}),
    "UNet, residual": ("UNet", {**PLAIN, **LEVELS, "num_res_units": 2}),
    "UNet, batch norm": ("UNet", {**PLAIN, **LEVELS, "norm": "batch", "act": "relu"}),
    "BasicUNet": ("BasicUNet", {**PLAIN, "features": (8, 8, 16, 32, 64, 8)}),
    "BasicUNet, batch norm": (
        "BasicUNet", {**PLAIN, "features": (8, 8, 16, 32, 64, 8), "norm": "batch"},
    ),
    "BasicUNetPlusPlus": ("BasicUNetPlusPlus", {**PLAIN, "features": (8, 8, 16, 32, 64, 8)}),
    "AttentionUnet": ("AttentionUnet", {**PLAIN, **LEVELS}),
    "SegResNet": ("SegResNet", {**PLAIN, "init_filters": 8}),
    "SegResNet, batch norm": ("SegResNet", {**PLAIN, "init_filters": 8, "norm": "batch"}),
    "SegResNetDS": ("SegResNetDS", {**PLAIN, "init_filters": 8}),
    "SegResNetDS, instance norm": (
        "SegResNetDS", {**PLAIN, "init_filters": 8, "norm": "instance", "dsdepth": 2},
    ),
    "SegResNetVAE": (
        "SegResNetVAE",
        {**PLAIN, "input_image_size": SIZE_PX, "init_filters": 8},
    ),
    "DynUNet": ("DynUNet", {**PLAIN, **KERNELS, "filters": [8, 16, 32, 64]}),
    "DynUNet, residual": (
        "DynUNet", {**PLAIN, **KERNELS, "filters": [8, 16, 32, 64], "res_block": True},
    ),
    "DynUNet, deep supervision": (
        "DynUNet", {**PLAIN, **KERNELS, "filters": [8, 16, 32, 64], "deep_supervision": True},
    ),
    "FlexibleUNet/efficientnet-b0": (
        "FlexibleUNet",
        {"in_channels": BANDS, "out_channels": CLASSES, "backbone": "efficientnet-b0",
         "spatial_dims": 2},
    ),
    "FlexibleUNet/resnet18": (
        "FlexibleUNet",
        {"in_channels": BANDS, "out_channels": CLASSES, "backbone": "resnet18",
         "spatial_dims": 2},
    ),
    "HighResNet": ("HighResNet", PLAIN),
    "VNet": ("VNet", {**PLAIN, "dropout_dim": 2}),
    "AHNet": (
        "AHNet", {"spatial_dims": 2, "in_channels": BANDS, "out_channels": CLASSES,
                  "psp_block_num": 3, "upsample_mode": "bilinear"},
    ),
    "MedNeXt": ("MedNeXt", {**PLAIN, "init_filters": 8}),
    "RegUNet": (
        "RegUNet",
        {"spatial_dims": 2, "in_channels": BANDS, "num_channel_initial": 8, "depth": 3,
         "out_channels": CLASSES},
    ),
    "VoxelMorphUNet": (
        "VoxelMorphUNet",
        {"spatial_dims": 2, "in_channels": BANDS, "unet_out_channels": CLASSES,
         "channels": (16, 32, 32, 32, 32, 32), "final_conv_channels": (16, 16)},
    ),
    "AutoEncoder": ("AutoEncoder", {**PLAIN, "channels": (8, 16, 32), "strides": (2, 2, 2)}),
    "Quicknat": (
        "Quicknat", {"num_classes": CLASSES, "num_channels": BANDS, "num_filters": 16},
    ),
}  # fmt: skip
MONAI_ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "UNETR": (
        "UNETR",
        {**PLAIN, "img_size": SIZE_PX, "feature_size": 8, "hidden_size": 96, "num_heads": 4,
         "mlp_dim": 192},
    ),
    "SwinUNETR": ("SwinUNETR", {**PLAIN, "feature_size": 12}),
}  # fmt: skip
TORCHGEO: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "FCN": ("fcn", "FCN", {"in_channels": BANDS, "classes": CLASSES}, BANDS),
    "FarSeg": (
        "farseg", "FarSeg",
        {"backbone": "resnet18", "classes": CLASSES, "backbone_pretrained": False}, 3,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Listed:
    """A network of the table.

    Attributes:
        library: Package that has it.
        name: Name in that package.
        choice: How it is made.
        attention: Whether pixels look at others by softmax, in windows or by Fourier transforms,
            so that no layer of known neighbourhood does the same.
    """

    library: str
    name: str
    choice: Choice
    attention: bool = False


class FCN(nn.Module):
    """Maps of a backbone of timm, the last three of which are scored and added, as in FCN-8s."""

    def __init__(self, backbone: str, **options: Any) -> None:
        super().__init__()
        self.backbone = import_module("timm").create_model(
            backbone, pretrained=False, features_only=True, in_chans=BANDS, **options
        )
        *_, third, second, last = self.backbone.feature_info.channels()
        self.head = nn.Sequential(
            nn.Conv2d(last, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.Dropout(0.1),
            nn.Conv2d(64, CLASSES, 1),
        )
        self.score = nn.ModuleList(nn.Conv2d(wide, CLASSES, 1) for wide in (second, third))

    def forward(self, x: Tensor) -> Tensor:
        maps = self.backbone(x)
        if maps[-1].shape[1] != self.head[0].in_channels:  # channels stand last
            maps = [one.permute(0, 3, 1, 2) for one in maps]
        *_, third, second, last = maps
        scores = self.head(last)
        for score, finer in zip(self.score, (second, third), strict=True):
            own = score(finer)
            scores = own + F.interpolate(
                scores, size=own.shape[-2:], mode="bilinear", align_corners=False
            )
        return F.interpolate(scores, size=x.shape[-2:], mode="bilinear", align_corners=False)


def load_torchgeo(file: str, name: str, options: dict[str, Any]) -> nn.Module:
    """A network of torchgeo, of a file that needs none of its readers."""
    spec = importlib.util.find_spec("torchgeo")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "models" / f"{file}.py"
    own = importlib.util.spec_from_file_location(f"torchgeo_{file}", path)
    assert own is not None
    assert own.loader is not None
    module = importlib.util.module_from_spec(own)
    own.loader.exec_module(module)
    network: nn.Module = getattr(module, name)(**options)
    return network


def networks_of_libraries() -> list[Listed]:
    """All networks that packages have."""
    return [*_smp(), *_torchvision(), *_timm(), *_monai(), *_torchgeo()]


def _smp() -> Iterator[Listed]:
    plain = {"encoder_weights": None, "in_channels": BANDS, "classes": CLASSES}
    pairs = [("Unet", encoder) for encoder in SMP_ENCODERS]
    for decoder in (*DECODERS, "MAnet", "Segformer"):
        encoders = SPREAD[:1] if decoder == "MAnet" else SPREAD
        pairs += [(decoder, encoder) for encoder in (*encoders, *MORE.get(decoder, ()))]
    pairs.append(("DPT", "tu-vit_tiny_patch16_224"))
    for decoder, encoder in pairs:
        options: dict[str, Any] = {"encoder_name": encoder, **plain}
        if decoder == "DPT":
            options["dynamic_img_size"] = True
        if "swin" in encoder or "maxvit" in encoder:
            options["img_size"] = SIZE_PX
        attention = decoder in ("MAnet", "DPT") or any(one in encoder for one in ATTENTION)
        choice = Choice(f"{SMP}:{decoder}", options, BANDS)
        yield Listed(SMP, f"{decoder}/{encoder}", choice, attention)


def _torchvision() -> Iterator[Listed]:
    plain = {"weights": None, "weights_backbone": None, "num_classes": CLASSES}
    for name in TORCHVISION:
        yield Listed(
            "torchvision", name, Choice(f"torchvision.models.segmentation:{name}", plain, 3)
        )


def _timm() -> Iterator[Listed]:
    for name in (*TIMM, *TIMM_ATTENTION):
        options: dict[str, Any] = {"backbone": name}
        if name.startswith("vit"):
            options["dynamic_img_size"] = True
        if name.startswith(("swin", "maxvit", "efficientformerv2")):
            options["img_size"] = SIZE_PX
        choice = Choice(f"{__name__}:FCN", options, BANDS)
        yield Listed("timm", name, choice, name in TIMM_ATTENTION)


def _monai() -> Iterator[Listed]:
    for name, (maker, options) in {**MONAI, **MONAI_ATTENTION}.items():
        choice = Choice(f"monai.networks.nets:{maker}", options, BANDS)
        yield Listed("monai", name, choice, name in MONAI_ATTENTION)


def _torchgeo() -> Iterator[Listed]:
    for name, (file, maker, options, bands) in TORCHGEO.items():
        given = {"file": file, "name": maker, "options": options}
        yield Listed("torchgeo", name, Choice(f"{__name__}:load_torchgeo", given, bands))
