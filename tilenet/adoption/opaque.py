"""Take a module as an opaque module, where it cannot be a list of layers.

Nothing is proved, for nothing is claimed: a map by windows is an approximation of the module on the
whole image, as everywhere in the field.
"""

import torch
from torch import Tensor, nn

from tilenet.adoption.adopt import Adopted
from tilenet.adoption.state import (
    copied,
    fixed_names,
    state_of,
    trained_names,
    twins,
    unreached_names,
)
from tilenet.errors import TilenetError, one_line
from tilenet.geometry.opaque import Opaque
from tilenet.model.dropout import MaskKey
from tilenet.model.opaque import OpaqueModule, digest_of, first_map

MOST_TRIES = 10  # a layer that is dropped half of the time is dropped each time in one of 1000


def take_as_it_is(module: nn.Module, bands: int, window_px: int, code: str) -> Adopted:
    """Take a module as the one layer of a network, in which no pixel looks beyond its window.

    It is run on a random window, forward and backward, until all weights have had a gradient, or
    several times: others are not trained, as behind a map that is detached.

    Args:
        module: Maps windows (B, bands, W, W) to maps (B, classes, W, W), which it returns alone,
            first, or as `out`. It is not changed. Its batch norms are frozen.
        window_px: Side W of the windows, even.
        code: Name of the function that builds it, as in `package:function`.

    Raises:
        TilenetError: It does not run on such windows, or forward changes its buffers.
    """
    if window_px % 2:
        raise TilenetError(
            f"windows overlap by half (window: {window_px} px); use an even number of pixels"
        )
    name = type(module).__name__
    trial = OpaqueModule(copied(module), MaskKey())
    before = {n: t.clone() for n, t in trial.named_buffers()}
    windows = f"{name}, window: {bands} bands, {window_px} × {window_px} px"
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            window = torch.randn(1, bands, window_px, window_px, dtype=torch.float32)
            output = _run_until_all_learn(trial, window)
            with torch.no_grad():
                size = trial.eval()(window).shape
    except Exception as error:  # a user's forward may raise anything
        raise TilenetError(
            f"a module must run on windows ({windows}: {type(error).__name__}: "
            f"{one_line(str(error))[:200]}); choose the window (crop_px) that it was made for"
        ) from error
    if output.ndim != 4 or size != output.shape or size[2:] != window.shape[2:]:
        raise TilenetError(
            f"a network gives one cell per pixel ({windows}: it gives {tuple(size)}); enlarge its "
            "map to the image's size"
        )
    changed = [n for n, t in trial.named_buffers() if not torch.equal(t, before[n])]
    if changed:
        raise TilenetError(
            f"forward may not change buffers, which would depend on the order of windows ({name}: "
            f"{changed[0]}); leave such a part in evaluation mode"
        )
    state = state_of(module)
    layer = Opaque(bands, output.shape[1], window_px, code, digest_of(module))
    names = {f"0.module.{own}": own for own in state}
    return Adopted(
        name,
        (layer,),
        names,
        bands,
        output.shape[1],
        state,
        fixed_names(trial.module) | unreached_names(trial.module),
        twins(module),
    )


def _run_until_all_learn(trial: OpaqueModule, window: Tensor) -> Tensor:
    """Add gradients up until all weights that are trained have one; return the last map."""
    for trial.mask_key.step in range(MOST_TRIES):
        output = first_map(trial(window))
        output.sum().backward()  # type: ignore[no-untyped-call]
        if not unreached_names(trial.module) & trained_names(trial.module):
            break  # else a layer may have been dropped
    return output
