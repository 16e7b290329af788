"""Losses as sums over the pixels that a tile owns, so that tiles and ranks can be added."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilenet.choices import VALUE_LOSSES
from tilenet.model.upload import upload

SMOOTHING = 1.0  # pixels; a class that is neither labelled nor predicted anywhere loses nothing


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, class_weights: Tensor | None = None
) -> Tensor:
    """Cross-entropy summed over pixels, Σ w·ℓ in float64; differentiable.

    Args:
        logits: (B, K, H, W).
        labels: (B, H, W), int64; `ignore_index` does not count.
        class_weights: (K,), the weight of a pixel by its label; None: 1.
    """
    # Summed in float64: over 10⁸ pixels float32 sums lose the digits that ranks must agree on.
    losses = F.cross_entropy(
        logits, labels, weight=class_weights, ignore_index=ignore_index, reduction="none"
    )
    return losses.sum(dtype=torch.float64)


def focal(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    gamma: float,
    class_weights: Tensor | None = None,
) -> Tensor:
    """The focal loss summed over pixels, Σ w·(1 − p)^γ·(−ln p) in float64; differentiable.

    p is the probability of the pixel's label; pixels with p near 1 count little, and γ = 0 is
    cross-entropy. Source: Lin et al., "Focal Loss for Dense Object Detection" (2017). Arguments as
    above.
    """
    losses = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none")
    # 1 − p without cancellation; never 0, since the slope of a root is infinite there.
    doubt = (-torch.expm1(-losses)).clamp_min(torch.finfo(losses.dtype).tiny)
    losses = doubt**gamma * losses
    if class_weights is not None:
        counted = labels != ignore_index
        losses = losses * class_weights[labels.masked_fill(~counted, 0)]
    return losses.sum(dtype=torch.float64)


def pixel_weight(labels: Tensor, ignore_index: int, class_weights: Tensor | None = None) -> Tensor:
    """Σ w over the pixels that count, in float64; arguments as above."""
    # Not the labels that count by themselves: the host would wait to hear how many they are.
    counted = labels != ignore_index
    if class_weights is None:
        return counted.count_nonzero().double()
    return class_weights.double()[labels.masked_fill(~counted, 0)].mul_(counted).sum()


def value_loss(name: str, output: Tensor, values: Tensor, delta: float) -> Tensor:
    """A regression's loss summed over pixels, and their number; float64, differentiable, (2,).

    Args:
        name: Loss of each error e: `l1` |e|; `l2` e²; `huber` e²/2 up to `delta`, then
            delta·(|e| − delta/2).
        output: The network's output, (B, 1, H, W).
        values: (B, H, W) in float64; NaN does not count.
    """
    counted = ~values.isnan()
    # In float64: of heights around 3000 m float32 would leave errors steps of a quarter millimetre.
    error = torch.where(counted, output[:, 0].double() - values.nan_to_num(), 0.0)
    if name == "l1":
        losses = error.abs()
    elif name == "l2":
        losses = error.square()
    else:
        losses = F.huber_loss(error, torch.zeros_like(error), reduction="none", delta=delta)
    return torch.stack([losses.sum(), counted.sum(dtype=torch.float64)])


def dice_sums(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Σ p·t, Σ p and Σ t of each class over the pixels that count, (3, K) in float64.

    p is the class's probability, t is 1 where it is the label. Arguments as above.
    """
    sums: Tensor = _ClassSums.apply(logits.softmax(dim=1), labels, ignore_index)  # type: ignore[no-untyped-call]
    return sums


class _ClassSums(torch.autograd.Function):
    """Sums class by class: no maps of all classes but the probabilities and their gradient."""

    @staticmethod
    def forward(ctx: Any, predicted: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        """The sums (3, K) of (B, K, H, W)."""
        ctx.save_for_backward(predicted, labels)
        ctx.ignore_index = ignore_index
        counted, sums = labels != ignore_index, []
        for number, of_class in enumerate(predicted.unbind(1)):
            truth = (labels == number) & counted
            sums += [
                torch.where(truth, of_class, 0).sum(dtype=torch.float64),
                torch.where(counted, of_class, 0).sum(dtype=torch.float64),
                truth.count_nonzero().double(),
            ]
        return torch.stack(sums).view(-1, 3).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of each pixel's probabilities."""
        predicted, labels = ctx.saved_tensors
        ignored, coming = labels == ctx.ignore_index, torch.empty_like(predicted)
        both, alone, _ = gradient.to(predicted.dtype)
        for number in range(predicted.shape[1]):
            of_class = coming[:, number].fill_(alone[number])
            of_class.masked_fill_(labels == number, both[number] + alone[number])
            of_class.masked_fill_(ignored, 0)
        return coming, None, None


def dice(sums: Tensor) -> Tensor:
    """1 − the mean over classes of 2·Σ p·t / (Σ p + Σ t), per image.

    Source: Milletari et al., "V-Net" (2016), with the plain sums in the denominator that are usual
    today.

    Args:
        sums: Sums of whole images, (…, 3, K).
    """
    both, predicted, truth = sums.unbind(dim=-2)
    return 1 - ((2 * both + SMOOTHING) / (predicted + truth + SMOOTHING)).mean(dim=-1)


@dataclass(frozen=True)
class Loss:
    """The loss of a run: a sum over pixels, and perhaps the Dice loss of whole images.

    Attributes:
        terms: Names of the summands: `ce`, `focal`, `dice`; or one of `VALUE_LOSSES`.
        num_classes: Classes of the network's output.
        ignore_index: Label of pixels that do not count.
        focal_gamma: γ of the focal loss.
        class_weights: Weight of a pixel by its label; None: 1 for all.
        huber_delta: Error from which the Huber loss of a regression is linear.
    """

    terms: tuple[str, ...]
    num_classes: int
    ignore_index: int
    focal_gamma: float = 2.0
    class_weights: tuple[float, ...] | None = None
    huber_delta: float = 1.0

    @property
    def of_images(self) -> bool:
        """Whether a term is of whole images, so that it needs sums over their tiles."""
        return "dice" in self.terms

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sums of pixels for a step: its loss, the weight that divides it, and Dice's sums.

        Args:
            logits: (B, K, H, W).
            labels: (B, H, W), whole numbers; of a regression float64.

        Returns:
            In float64, differentiable: the terms that are sums over pixels; Σ w over the pixels
            that count; with `dice` the 3·K numbers of `dice_sums`.
        """
        if self.terms[0] in VALUE_LOSSES:
            return value_loss(self.terms[0], logits, labels, self.huber_delta)
        weights, labels = None, labels.long()
        if self.class_weights is not None:
            values = torch.tensor(self.class_weights, dtype=logits.dtype)
            weights = upload(values, logits.device)
        loss = torch.zeros((), dtype=torch.float64, device=logits.device)
        if "ce" in self.terms:
            loss = cross_entropy(logits, labels, self.ignore_index, weights)
        elif "focal" in self.terms:
            loss = focal(logits, labels, self.ignore_index, self.focal_gamma, weights)
        sums = [loss[None], pixel_weight(labels, self.ignore_index, weights)[None]]
        if self.of_images:
            sums.append(dice_sums(logits, labels, self.ignore_index).flatten())
        return torch.cat(sums)
