"""Skips by name: what was stashed comes second, cut or padded to fit."""

import pytest
import torch
from torch import nn
from torchgpipe.skip.skippable import verify_skippables

from tilenet.geometry.layers import Join, Stash
from tilenet.model.skips import join_layer, stash_layer


def maps(channels: int, height: int, width: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, channels, height, width, generator=generator, dtype=torch.float64)


def join(skip: torch.Tensor, x: torch.Tensor, fit: str) -> torch.Tensor:
    """Stash one map, and pop it onto another."""
    assert torch.equal(kept("a")(skip), skip)
    out: torch.Tensor = joined("a", fit)(x)
    return out


def kept(name: str) -> nn.Module:
    return stash_layer(Stash(3, 3, name))


def joined(name: str, fit: str = "pad") -> nn.Module:
    return join_layer(Join(4, 7, (name,), fit=fit))  # type: ignore[arg-type]


@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_the_stashed_map_comes_second(fit: str) -> None:
    skip, x = maps(3, 5, 7, 1), maps(4, 5, 7, 2)
    assert torch.equal(join(skip, x, fit), torch.cat([x, skip], 1))


@pytest.mark.parametrize(("rows", "cols"), [(4, 2), (0, 6), (8, 0)])
def test_crop_cuts_the_stashed_map_evenly_on_both_sides(rows: int, cols: int) -> None:
    x = maps(4, 5, 7, 2)
    skip = maps(3, 5 + rows, 7 + cols)
    middle = skip[:, :, rows // 2 : rows // 2 + 5, cols // 2 : cols // 2 + 7]
    assert torch.equal(join(skip, x, "crop"), torch.cat([x, middle], 1))


@pytest.mark.parametrize(("rows", "cols"), [(1, 0), (0, 1), (1, 1), (3, 2)])
def test_pad_adds_zeros_below_and_right_of_the_other_map(rows: int, cols: int) -> None:
    x = maps(4, 5, 7, 2)
    skip = maps(3, 5 + rows, 7 + cols)
    padded = torch.zeros(2, 4, 5 + rows, 7 + cols, dtype=torch.float64)
    padded[:, :, :5, :7] = x
    assert torch.equal(join(skip, x, "pad"), torch.cat([padded, skip], 1))


def test_gradients_go_both_ways() -> None:
    skip, x = maps(3, 9, 9).requires_grad_(), maps(4, 5, 5, 2).requires_grad_()
    weight = maps(7, 5, 5, 3)
    (join(skip, x, "crop") * weight).sum().backward()
    assert skip.grad is not None
    assert torch.equal(x.grad, weight[:, :4])
    assert torch.equal(skip.grad[:, :, 2:7, 2:7], weight[:, 4:])
    assert skip.grad.sum() == pytest.approx(weight[:, 4:].sum().item(), rel=1e-13)


def test_nested_skips_do_not_mix() -> None:
    network = nn.Sequential(
        kept("outer"),
        nn.MaxPool2d(2),
        kept("inner"),
        nn.Upsample(scale_factor=1),
        joined("inner"),
        nn.Upsample(scale_factor=2),
        joined("outer"),
    )
    verify_skippables(network)
    x = maps(3, 8, 10)
    pooled = nn.functional.max_pool2d(x, 2)
    below = nn.functional.interpolate(torch.cat([pooled, pooled], 1), scale_factor=2)
    for _ in range(2):  # nothing is left over from one pass to the next
        assert torch.equal(network(x), torch.cat([below, x], 1))


def test_torchgpipe_finds_a_skip_that_nobody_pops() -> None:
    with pytest.raises(TypeError, match="no module declared"):
        verify_skippables(nn.Sequential(kept("a"), joined("b")))
