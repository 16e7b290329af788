"""Dropout masks are a function of (seed, step, image, layer, channel) and nothing else."""

import pytest
import torch

from tilenet.geometry.layers import Dropout
from tilenet.model.dropout import KeyedDropout, MaskKey
from tilenet.random_keys import uniform

CHANNELS = 23


def maps(batch: int, height: int = 5, width: int = 7, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(batch)
    values = torch.randn(batch, CHANNELS, height, width, generator=generator, dtype=torch.float64)
    return (values + values.sign()).to(dtype)  # nowhere near 0


def dropped(
    images: tuple[int, ...], p: float = 0.4, *, seed: int = 1, step: int = 2, layer: int = 3
) -> torch.Tensor:
    """Whether each channel of each sample is dropped, as one pass on a fresh layer shows it."""
    x = maps(len(images))
    out = KeyedDropout(Dropout(5, 5, p), layer, MaskKey(seed, step, images))(x)
    return (out == 0).all(dim=(2, 3))


def test_whole_channels_are_dropped_and_the_others_scaled() -> None:
    x = maps(4)
    out = KeyedDropout(Dropout(5, 5, 0.4), 3, MaskKey(1, 2, (5, 0, 5, 9)))(x)
    kept = out[:, :, :1, :1] != 0
    assert 0 < kept.sum() < kept.numel()
    assert torch.equal(out, x * (kept.double() / 0.6))


@pytest.mark.parametrize("images", [(5, 0, 12, 5), (12,)])
@pytest.mark.parametrize("key", [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)])
@pytest.mark.parametrize("p", [0.1, 0.4, 0.9])
def test_masks_are_the_documented_function(
    images: tuple[int, ...], key: tuple[int, int, int], p: float
) -> None:
    """Of uniform numbers (tests/test_random_keys.py); of no other image of the batch."""
    seed, step, layer = key
    wanted = [uniform(CHANNELS, seed, "dropout", step, image, layer) < p for image in images]
    found = dropped(images, p, seed=seed, step=step, layer=layer)
    assert found.tolist() == [row.tolist() for row in wanted]


def test_tiles_of_any_size_share_their_images_mask() -> None:
    layer = KeyedDropout(Dropout(5, 5, 0.4), 3, MaskKey(1, 2, (5,)))
    small, large = maps(1, 1, 2), maps(1, 40, 3)
    assert torch.equal((layer(small) == 0)[..., 0, 0], (layer(large) == 0)[..., 0, 0])


def test_the_key_is_read_in_each_pass() -> None:
    key = MaskKey(1, 2, (5,))
    layer, x = KeyedDropout(Dropout(5, 5, 0.4), 3, key), maps(1)
    first = layer(x)
    key.step, key.images = 3, (6,)
    second = layer(x)
    assert not torch.equal(first, second)
    assert torch.equal(second, KeyedDropout(Dropout(5, 5, 0.4), 3, MaskKey(1, 3, (6,)))(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    x = maps(2, dtype=dtype)
    out = KeyedDropout(Dropout(5, 5, 0.5), 3, MaskKey(1, 2, (5, 6)))(x)
    assert out.dtype == dtype
    assert torch.equal(out[out != 0], 2 * x[out != 0])


@pytest.mark.parametrize("drops", ["channels", "cells", "samples"])
def test_with_probability_1_all_is_dropped_as_torch_has_it(drops: str) -> None:
    x = maps(2).requires_grad_()
    layer = Dropout(CHANNELS, CHANNELS, 1.0, drops)  # type: ignore[arg-type]
    out = KeyedDropout(layer, 3, MaskKey(1, 2, (5, 6))).train()(x)
    out.backward(torch.ones_like(out))
    assert torch.equal(out, torch.nn.functional.dropout(x, 1.0))
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("images", [(), (1,), (1, 2, 3)])
def test_a_sample_without_an_image_number_is_an_error(images: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"batch: 2, images: {len(images)}"):
        KeyedDropout(Dropout(5, 5, 0.4), 3, MaskKey(1, 2, images))(maps(2))
