"""The loss is a sum over pixels and a sum of weights, against loops in numpy."""

import math

import numpy as np
import pytest
import torch

from tilenet.model.loss import cross_entropy

CLASSES, IGNORE = 5, 255


def sample(
    seed: int = 1, shape: tuple[int, int, int] = (2, 7, 11)
) -> tuple[np.ndarray, np.ndarray]:
    """Logits (B, K, H, W) and labels (B, H, W), a quarter of which do not count."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(shape[0], CLASSES, *shape[1:])) * 8
    labels = rng.integers(0, CLASSES, shape)
    labels[rng.random(shape) < 0.25] = IGNORE
    return logits, labels


def by_hand(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, ignore: int = IGNORE
) -> tuple[float, float]:
    terms, counted = [], []
    for image, row, col in np.ndindex(labels.shape):
        label = labels[image, row, col]
        if label != ignore:
            pixel = logits[image, :, row, col]
            top = pixel.max()
            log_sum = top + math.log(math.fsum(math.exp(x - top) for x in pixel))
            terms.append(weights[label] * (log_sum - pixel[label]))
            counted.append(weights[label])
    return math.fsum(terms), math.fsum(counted)


@pytest.mark.parametrize("weights", [None, [0.1, 3.0, 0.0, 1.7, 1e-3]])
@pytest.mark.parametrize("ignore", [IGNORE, -1, 3])
def test_loss_and_weight_are_sums_over_the_pixels_that_count(
    weights: list[float] | None, ignore: int
) -> None:
    logits, labels = sample()
    labels[labels == IGNORE] = ignore
    class_weights = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    loss, weight = cross_entropy(
        torch.from_numpy(logits), torch.from_numpy(labels), ignore, class_weights
    )
    wanted = by_hand(logits, labels, np.array(weights or [1.0] * CLASSES), ignore)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(wanted[0], rel=1e-14)
    assert isinstance(weight, float)
    assert weight == pytest.approx(wanted[1], rel=1e-14)


def test_the_gradient_is_softmax_minus_one_hot() -> None:
    logits, labels = sample()
    weights = np.array([0.1, 3.0, 0.5, 1.7, 1e-3])
    leaf = torch.from_numpy(logits).requires_grad_()
    loss, _ = cross_entropy(leaf, torch.from_numpy(labels), IGNORE, torch.from_numpy(weights))
    loss.backward()
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    wanted = powers / powers.sum(axis=1, keepdims=True)
    for image, row, col in np.ndindex(labels.shape):
        label = labels[image, row, col]
        wanted[image, min(label, CLASSES - 1), row, col] -= 1
        wanted[image, :, row, col] *= 0 if label == IGNORE else weights[label]
    assert leaf.grad is not None
    assert leaf.grad.numpy() == pytest.approx(wanted, abs=1e-14)


def test_the_sums_of_parts_are_the_sum_of_the_whole() -> None:
    logits, labels = (torch.from_numpy(x) for x in sample(shape=(1, 12, 13)))
    whole = cross_entropy(logits, labels, IGNORE)
    parts = [
        cross_entropy(logits[:, :, rows], labels[:, rows], IGNORE)
        for rows in (slice(0, 5), slice(5, 6), slice(6, 12))
    ]
    assert sum(part[0].item() for part in parts) == pytest.approx(whole[0].item(), rel=1e-14)
    assert sum(part[1] for part in parts) == whole[1]


def test_float32_losses_are_summed_in_float64() -> None:
    logits, labels = (torch.from_numpy(x) for x in sample(shape=(1, 700, 900)))
    single = logits.float()
    loss, _ = cross_entropy(single, labels, IGNORE)
    each = torch.nn.functional.cross_entropy(
        single, labels, ignore_index=IGNORE, reduction="none"
    ).numpy()
    assert loss.item() == pytest.approx(math.fsum(each.ravel().tolist()), rel=1e-13)


def test_a_float32_weight_is_counted_in_float64() -> None:
    labels = torch.from_numpy(np.random.default_rng(1).integers(0, CLASSES, (1, 400, 500)))
    logits = torch.randn(1, CLASSES, 400, 500, generator=torch.Generator().manual_seed(1))
    weights = torch.tensor([0.1, 0.2, 0.3, 0.7, 0.9])
    _, weight = cross_entropy(logits, labels, IGNORE, weights)
    wanted = math.fsum(weights.double()[labels.ravel()].tolist())
    assert weight == pytest.approx(wanted, rel=1e-13)


def test_a_tile_without_labels_adds_nothing_and_has_a_gradient() -> None:
    logits, labels = sample()
    leaf = torch.from_numpy(logits).requires_grad_()
    loss, weight = cross_entropy(leaf, torch.full(labels.shape, IGNORE), IGNORE)
    loss.backward()
    assert (loss.item(), weight) == (0.0, 0.0)
    assert leaf.grad is not None
    assert not leaf.grad.any()
