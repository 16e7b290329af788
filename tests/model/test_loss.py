"""The loss is a sum over pixels and a sum of weights, against numpy."""

import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilenet.model.loss import SMOOTHING, Loss, cross_entropy, dice, dice_sums, focal, pixel_weight
from tilenet.planning.memory.live import LiveBytes

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


def counted_pixels(
    logits: np.ndarray, labels: np.ndarray, ignore: int = IGNORE
) -> tuple[np.ndarray, np.ndarray]:
    """Logits (N, K) and labels (N,) of the pixels that count."""
    return np.moveaxis(logits, 1, -1)[labels != ignore], labels[labels != ignore]


@pytest.mark.parametrize("weights", [None, [0.1, 3.0, 0.0, 1.7, 1e-3]])
@pytest.mark.parametrize("ignore", [IGNORE, -1, 3])
def test_loss_and_weight_are_sums_over_the_pixels_that_count(
    weights: list[float] | None, ignore: int
) -> None:
    logits, labels = sample()
    labels[labels == IGNORE] = ignore
    class_weights = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    loss = cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels), ignore, class_weights)
    weight = pixel_weight(torch.from_numpy(labels), ignore, class_weights)
    pixels, labels = counted_pixels(logits, labels, ignore)
    each = np.array(weights or [1.0] * CLASSES)[labels]
    sums = np.exp(pixels - pixels.max(1, keepdims=True)).sum(1)
    terms = np.log(sums) + pixels.max(1) - np.take_along_axis(pixels, labels[:, None], 1)[:, 0]
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(math.fsum(each * terms), rel=1e-14)
    assert weight.dtype == torch.float64
    assert weight == pytest.approx(math.fsum(each), rel=1e-14)


def test_the_gradient_is_softmax_minus_one_hot() -> None:
    logits, labels = sample()
    weights = np.array([0.1, 3.0, 0.5, 1.7, 1e-3])
    leaf = torch.from_numpy(logits).requires_grad_()
    loss = cross_entropy(leaf, torch.from_numpy(labels), IGNORE, torch.from_numpy(weights))
    loss.backward()
    pixels, counted = counted_pixels(logits, labels)
    powers = np.exp(pixels - pixels.max(1, keepdims=True))
    wanted = powers / powers.sum(1, keepdims=True) - np.eye(CLASSES)[counted]
    assert leaf.grad is not None
    found, _ = counted_pixels(leaf.grad.numpy(), labels)
    assert found == pytest.approx(wanted * weights[counted][:, None], abs=1e-14)
    assert not np.moveaxis(leaf.grad.numpy(), 1, -1)[labels == IGNORE].any()


def test_the_sums_of_parts_are_the_sum_of_the_whole() -> None:
    logits, labels = (torch.from_numpy(x) for x in sample(shape=(1, 12, 13)))
    places = slice(0, 5), slice(5, 6), slice(6, 12)
    for of in (cross_entropy, dice_sums):
        whole = of(logits, labels, IGNORE).numpy()
        parts = [of(logits[:, :, rows], labels[:, rows], IGNORE).numpy() for rows in places]
        assert sum(parts) == pytest.approx(whole, rel=1e-14)
    weight = sum(pixel_weight(labels[:, rows], IGNORE) for rows in places)
    assert weight == pixel_weight(labels, IGNORE)


def test_float32_losses_are_summed_in_float64() -> None:
    logits, labels = (torch.from_numpy(x) for x in sample(shape=(1, 700, 900)))
    single = logits.float()
    loss = cross_entropy(single, labels, IGNORE)
    each = torch.nn.functional.cross_entropy(
        single, labels, ignore_index=IGNORE, reduction="none"
    ).numpy()
    assert loss.item() == pytest.approx(math.fsum(each.ravel().tolist()), rel=1e-13)


def test_a_float32_weight_is_counted_in_float64() -> None:
    labels = torch.from_numpy(np.random.default_rng(1).integers(0, CLASSES, (1, 400, 500)))
    weights = torch.tensor([0.1, 0.2, 0.3, 0.7, 0.9])
    weight = pixel_weight(labels, IGNORE, weights)
    wanted = math.fsum(weights.double()[labels.ravel()].tolist())
    assert weight == pytest.approx(wanted, rel=1e-13)


def test_a_tile_without_labels_adds_nothing_and_has_a_gradient() -> None:
    logits, labels = sample()
    leaf = torch.from_numpy(logits).requires_grad_()
    nothing = torch.full(labels.shape, IGNORE)
    loss = cross_entropy(leaf, nothing, IGNORE)
    loss.backward()
    assert (loss.item(), pixel_weight(nothing, IGNORE)) == (0.0, 0.0)
    assert leaf.grad is not None
    assert not leaf.grad.any()


def plain_dice(
    logits: np.ndarray, labels: np.ndarray, ignore: int = IGNORE
) -> tuple[np.ndarray, float]:
    """Sums over pixels of both, found and truth by class (3, K), and the loss."""
    pixels, labels = counted_pixels(logits, labels, ignore)
    powers = np.exp(pixels - pixels.max(1, keepdims=True))
    found, truth = powers / powers.sum(1, keepdims=True), np.eye(CLASSES)[labels]
    sums = np.array([part.sum(0) for part in (found * truth, found, truth)])
    scores = (2 * sums[0] + SMOOTHING) / (sums[1] + sums[2] + SMOOTHING)
    return sums, 1 - scores.mean()


@pytest.mark.parametrize("ignore", [IGNORE, -1, 3])
@pytest.mark.parametrize("absent", [(), (0,), (1, 4)])
def test_dice_of_one_image(ignore: int, absent: tuple[int, ...]) -> None:
    logits, labels = sample(shape=(1, 7, 11))
    for label in absent:
        labels[labels == label] = 2
    labels[labels == IGNORE] = ignore
    sums = dice_sums(torch.from_numpy(logits), torch.from_numpy(labels), ignore)
    assert (sums.dtype, sums.shape) == (torch.float64, (3, CLASSES))
    wanted_sums, wanted = plain_dice(logits, labels, ignore)
    assert sums.numpy() == pytest.approx(wanted_sums, rel=1e-14)
    assert not sums[2, list(absent)].any()
    assert 0.05 < wanted < 0.95
    assert dice(sums).item() == pytest.approx(wanted, rel=1e-14)


def test_dice_of_several_images_is_one_value_each() -> None:
    logits, labels = sample(shape=(3, 5, 6))
    each = [
        dice_sums(torch.from_numpy(logits[i : i + 1]), torch.from_numpy(labels[i : i + 1]), IGNORE)
        for i in range(3)
    ]
    found = dice(torch.stack(each))
    wanted = [plain_dice(logits[i : i + 1], labels[i : i + 1])[1] for i in range(3)]
    assert found.tolist() == pytest.approx(wanted, rel=1e-14)


def test_dice_float32_is_summed_in_float64() -> None:
    logits, labels = (torch.from_numpy(x) for x in sample(shape=(1, 300, 400)))
    single = logits.float()
    counted = (labels != IGNORE)[:, None]
    wanted = math.fsum((single.softmax(1) * counted)[:, 1].ravel().tolist())
    assert dice_sums(single, labels, IGNORE)[1, 1].item() == pytest.approx(wanted, rel=1e-13)


def test_the_gradient_of_dice() -> None:
    logits, labels = (torch.from_numpy(x) for x in sample(shape=(1, 3, 4)))
    labels[labels == 1] = 0  # a class that is nowhere still has a gradient
    logits = (logits / 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: dice(dice_sums(x, labels, IGNORE)), (logits,))
    (gradient,) = torch.autograd.grad(dice(dice_sums(logits, labels, IGNORE)), logits)
    counted = (labels != IGNORE)[:, None].expand_as(gradient)
    assert gradient[counted].all()
    assert not gradient[~counted].any()


def sums_by_maps(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sums of Dice, with maps of all classes that autograd goes back through."""
    counted = (labels != IGNORE)[:, None]
    truth = (labels[:, None] == torch.arange(CLASSES)[:, None, None]) * counted
    found = logits.softmax(1) * counted
    return torch.stack([part.sum((0, 2, 3)) for part in (found * truth, found, truth)])


def test_the_gradient_of_dice_is_that_of_maps_of_classes() -> None:
    logits, labels = (torch.from_numpy(x) for x in sample(shape=(2, 7, 11)))
    logits.requires_grad_()
    slopes = torch.randn(3, CLASSES, dtype=torch.float64)
    found, wanted = (
        torch.autograd.grad((sums * slopes).sum(), logits)[0]
        for sums in (dice_sums(logits, labels, IGNORE), sums_by_maps(logits, labels))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


def test_dice_holds_maps_of_probabilities_and_of_gradients_alone() -> None:
    logits, labels = (torch.from_numpy(x) for x in sample(shape=(1, 30, 40)))
    logits = logits.float().requires_grad_()
    with LiveBytes() as live:
        dice(dice_sums(logits, labels, IGNORE)).backward()  # type: ignore[no-untyped-call]
    # Probabilities, their gradient and that of the logits; less than two values more a pixel.
    assert 3 * CLASSES * 4 <= live.peak / labels.numel() < (3 * CLASSES + 2) * 4


def test_dice_where_nothing_is_labelled_is_0_without_a_gradient() -> None:
    logits, labels = sample()
    leaf = torch.from_numpy(logits).requires_grad_()
    loss = dice(dice_sums(leaf, torch.full(labels.shape, IGNORE), IGNORE))
    loss.backward()
    assert loss.item() == 0.0
    assert leaf.grad is not None
    assert not leaf.grad.any()


# --- focal


@pytest.mark.parametrize("weights", [None, [0.1, 3.0, 0.0, 1.7, 1e-3]])
@pytest.mark.parametrize("gamma", [0.5, 2.0, 5.0])
def test_focal_is_a_sum_over_the_pixels_that_count(
    gamma: float, weights: list[float] | None
) -> None:
    logits, labels = sample()
    pixels, counted = counted_pixels(logits, labels)
    powers = np.exp(pixels - np.take_along_axis(pixels, counted[:, None], 1))
    # p is 1 / (1 + others), without cancellation where it is nearly 1
    others = np.where(np.eye(CLASSES)[counted], 0, powers).sum(1)
    each = np.array(weights or [1.0] * CLASSES)[counted]
    terms = each * (others / (1 + others)) ** gamma * np.log1p(others)
    class_weights = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    leaf = torch.from_numpy(logits).requires_grad_()
    found = focal(leaf, torch.from_numpy(labels), IGNORE, gamma, class_weights)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(math.fsum(terms), rel=1e-13)
    small = (leaf.detach()[:1, :, :2, :3] / 8).requires_grad_()
    part = torch.from_numpy(labels[:1, :2, :3])
    torch.autograd.gradcheck(lambda x: focal(x, part, IGNORE, gamma, class_weights), small)


@pytest.mark.parametrize("weights", [None, [0.1, 3.0, 0.0, 1.7, 1e-3]])
def test_focal_with_gamma_0_is_cross_entropy(weights: list[float] | None) -> None:
    class_weights = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    found = []
    for loss in (
        lambda *a: focal(*a, 0.0, class_weights),
        lambda *a: cross_entropy(*a, class_weights),
    ):
        logits, labels = (torch.from_numpy(x) for x in sample())
        value = loss(logits.requires_grad_(), labels, IGNORE)
        value.backward()
        found.append((value.item(), logits.grad.numpy()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-14)
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-14)


@pytest.mark.parametrize("gamma", [0.1, 0.5, 1.0, 2.0])
def test_pixels_that_are_sure_have_a_slope_of_0(gamma: float) -> None:
    """Their probability is 1 to the last bit, where the slope of a root is infinite."""
    logits, labels = (torch.from_numpy(x) for x in sample())
    single = (logits.float() * 40).requires_grad_()
    counted = labels != IGNORE
    right = single.detach().argmax(1).where(counted, IGNORE)
    found = focal(single, right, IGNORE, gamma)
    found.backward()
    margin = single.detach().topk(2, dim=1).values
    sure = (margin[:, 0] - margin[:, 1] > 110)[:, None].expand_as(logits)
    assert sure.any()
    assert single.grad is not None
    assert single.grad.isfinite().all()
    assert (single.grad[sure] == 0).all()
    assert math.isfinite(found.item())


@pytest.mark.parametrize("terms", [("ce",), ("focal", "dice"), ("ce", "dice")])
@pytest.mark.parametrize("weights", [None, (0.1, 3.0, 0.0, 1.7, 1e-3)])
def test_labels_of_few_bytes_lose_what_wide_ones_do(
    terms: tuple[str, ...], weights: tuple[float, ...] | None
) -> None:
    logits, labels = (torch.from_numpy(x) for x in sample())
    loss = Loss(terms, CLASSES, IGNORE, class_weights=weights)
    assert torch.equal(loss.sums(logits, labels.to(torch.uint8)), loss.sums(logits, labels))


@pytest.mark.parametrize("weights", [None, (0.1, 3.0, 0.0, 1.7, 1e-3)])
def test_a_loss_never_makes_the_host_wait(weights: tuple[float, ...] | None) -> None:
    """Not for numbers, and not for how many pixels count: fake tensors know neither."""
    logits, labels = (torch.from_numpy(x) for x in sample())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(logits), mode.from_tensor(labels)
        sums = Loss(("ce", "dice"), CLASSES, IGNORE, class_weights=weights).sums(*fake)
    assert sums.shape == (2 + 3 * CLASSES,)
