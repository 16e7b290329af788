"""Run a module and its list of layers on random images, and refuse a list that differs.

The module runs as in training, with the parts in evaluation that it keeps there, forward and
backward; and in evaluation, at a size of other remainders. So results that a module gives at some
sizes only, for some numbers of images, or in one of its modes are compared, and so are buffers that
it changes by itself. Random masks keep everything, in both. Gradients that functions of the module
make by themselves are compared where they are large too, and of several images. An image with zeros
shows cells next to infinite ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from tilenet.adoption.proof.as_defined import AsDefined
from tilenet.adoption.proof.sizes import prove_sizes
from tilenet.adoption.proof.steady import prove_steady
from tilenet.adoption.state import unreached_names
from tilenet.adoption.ties import check_hooks
from tilenet.errors import TilenetError
from tilenet.model.dropout import KeyedDropout
from tilenet.model.network import Network

LEAST_PX = 32  # half the shorter side of the images, where a unit is at most half of this
ROUNDING = 1e-9  # of float64, over some hundred layers, relative to the largest value
SMALL = 1e-3  # of the largest gradient of all weights: smaller ones are compared with this much
GRADIENT = "the gradient"
ALMOST = 1 - 1e-6  # a random number below 1
LARGE = 1e6  # factor of gradients
COUNT = "num_batches_tracked"  # of batch norm, on which nothing depends


@dataclass(frozen=True)
class _Case:
    """A size and a mode for comparing a module and its list.

    Attributes:
        size: Height and width.
        trains: Whether both run as in training.
        backward: Whether gradients are compared too.
        scale: Factor of the gradients.
    """

    images: int
    size: tuple[int, int]
    trains: bool
    backward: bool
    scale: float = 1.0

    def __str__(self) -> str:
        images = f"{self.images} image{'s' * (self.images > 1)} of {self.size[0]} × {self.size[1]}"
        return f"{images} px in {'training' if self.trains else 'evaluation'}"


def _cases(unit_px: int, frozen: bool) -> tuple[_Case, ...]:
    """Sizes and numbers of other remainders than the ones that are recorded, powers of two.

    With statistics of a step, which mix images, gradients are those of three. Else of one, and of
    three small ones only the output is compared: torch's convolutions in float64 read all weights
    once per image, in backward twice, so that this takes a third less. Evaluation comes last.
    """
    units = LEAST_PX // unit_px
    rows, cols = 3 * (5 * units // 3 | 1), 5 * (3 * units // 5 | 1)
    if not units:  # units are large
        return _case(3, (2, 1), unit_px, "gradients"), _case(1, (1, 3), unit_px, "evaluated")
    trained = 2 * units, 3 * units | 1
    if not frozen:
        trained = trained if units > 1 else (2, 1)
        whole = _case(1, (rows, cols), unit_px, "evaluated")
        return _case(3, trained, unit_px, "gradients"), whole
    three = (1, 1) if units == 1 else (2 * units, 2 * units)
    return (
        _case(1, trained, unit_px, "gradients"),
        _case(3, three, unit_px, "trained"),
        _case(1, (rows, cols if units > 1 else 1), unit_px, "evaluated"),
    )


def _case(
    images: int,
    units: tuple[int, int],
    unit_px: int,
    how: Literal["gradients", "trained", "evaluated"],
) -> _Case:
    size = units[0] * unit_px, units[1] * unit_px
    return _Case(images, size, how != "evaluated", how == "gradients")


@dataclass(frozen=True)
class Subject:
    """A module and its list of layers, in float64.

    Attributes:
        module: The module in the modes in which it was recorded; it is changed.
        network: The network of the list, with the module's weights; it is changed.
        names: Names of the network's weights and buffers in the module.
        bands: Channels of the image.
        unit_px: Divisor of the images' sizes.
        frozen: Whether batch norm takes its running statistics in training too.
    """

    module: nn.Module
    network: Network
    names: Mapping[str, str]
    bands: int
    unit_px: int
    frozen: bool

    def differs(self, what: str, case: _Case, why: str) -> TilenetError:
        """The error on a difference."""
        return TilenetError(
            f"a network must be its list of layers ({type(self.module).__name__}, {what} of {case} "
            f"{why}); use one that does the same at all sizes, for any number of images and in "
            "both modes, else report it, please"
        )


def prove(subject: Subject) -> frozenset[str]:
    """Compare outputs, gradients and buffers.

    Returns:
        Names in the module of weights that no gradient reaches.

    Raises:
        TilenetError: They differ.
    """
    module = subject.module
    own = Network([_keeps_all(layer) for layer in subject.network], subject.network.mask_key)
    for part in module.modules():
        if subject.frozen and isinstance(part, _BatchNorm):
            part.eval()
    modes = {part: part.training for part in module.modules()}
    generator = torch.Generator().manual_seed(0)
    unreached: set[str] = set()
    cases = _cases(subject.unit_px, subject.frozen)
    unknown = _image(subject, cases[0], generator)
    _prove_steady(subject, unknown)
    for case in cases:
        if not case.trains:
            module.eval()
            own.eval()
        differentiates = _compare_on(subject, own, _image(subject, case, generator), case)
        if case.backward:
            unreached = unreached_names(module) & set(subject.names.values())
        if case.backward and differentiates:
            large = replace(case, images=3, scale=LARGE)
            _compare_on(subject, own, _image(subject, large, generator), large)
        if case.backward and any(isinstance(layer, nn.AdaptiveMaxPool2d) for layer in own):
            _compare_on(subject, own, _quarters(subject, case, generator), case, alike=True)
    _compare_zeros(subject, own, _image(subject, cases[0], generator)[:1], cases[-1])
    _prove_steady(subject, unknown)
    check_hooks(module, subject.names.values())
    prove_sizes(module, modes, subject.bands, subject.unit_px)
    return frozenset(unreached)


def _image(subject: Subject, case: _Case, generator: torch.Generator) -> Tensor:
    shape = case.images, subject.bands, *case.size
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _quarters(subject: Subject, case: _Case, generator: torch.Generator) -> Tensor:
    """Images of four quarters, each of one value: of equal maxima the gradients of some are 0."""
    values = _image(subject, replace(case, size=(2, 2)), generator)
    rows, cols = (torch.arange(cells) * 2 // cells for cells in case.size)
    return values[:, :, rows][..., cols]


def _compare_on(
    subject: Subject, own: Network, image: Tensor, case: _Case, *, alike: bool = False
) -> bool:
    """Compare on an image; return whether functions of the module change gradients.

    Args:
        alike: Whether outputs that differ by rounding are not compared: equal cells that differ by
            it too have another maximum.
    """
    module = subject.module
    before = {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    as_defined = AsDefined(frozen=subject.frozen and case.trains)
    with _MasksKeepAll(), as_defined:  # type: ignore[no-untyped-call]
        expected, differentiates = _run(
            module, image, {name: name for name in subject.names.values()}, case
        )
    # A weight that the list does not train must have no gradient in the module.
    actual = {what: torch.zeros_like(t) for what, t in expected.items() if GRADIENT in what}
    actual |= before | _run(own, image, subject.names, case)[0]
    outputs = expected["the output"], actual["the output"]
    if alike and not (torch.equal(*outputs) and all(map(_is_finite, expected.values()))):
        return False
    largest = max((_most(t) for what, t in expected.items() if GRADIENT in what), default=0.0)
    unneeded = _not_needed(module, subject.names)
    for what in (name for name in expected if name not in unneeded):
        least = SMALL * largest if GRADIENT in what else 0.0
        _compare(subject, case, what, (expected[what], actual[what]), least)
    hooked = any(part._backward_hooks or part._backward_pre_hooks for part in module.modules())
    return differentiates or hooked or as_defined.hooked


def _compare_zeros(subject: Subject, own: Network, image: Tensor, case: _Case) -> None:
    """Compare in evaluation on an image with zeros, whose ratios and logarithms are not finite."""
    rows, cols = image.shape[2:]
    image[..., rows // 4 : rows // 2, cols // 4 : cols // 2] = 0.0
    case = replace(case, images=1, size=(rows, cols))
    with _MasksKeepAll(), AsDefined(frozen=False):  # type: ignore[no-untyped-call]
        expected = _run(subject.module, image, {}, case)[0]["the output"].double()
    actual = _run(own, image, {}, case)[0]["the output"].double().view_as(expected)
    same = (expected == actual) | (expected.isnan() & actual.isnan())
    apart = _most((expected - actual).masked_fill(same, 0.0))
    most = _most(expected.masked_fill(~expected.isfinite(), 0.0))
    if not apart <= ROUNDING * most:
        raise subject.differs("the output", case, f"with zeros differs by {apart:.2g}")


def _run(
    network: nn.Module, image: Tensor, names: Mapping[str, str], case: _Case
) -> tuple[dict[str, Tensor], bool]:
    """Output, gradients of a random function of it, and buffers, by names in the module.

    And whether functions in Python make gradients.
    """
    image = image.clone().requires_grad_(case.backward)
    network.zero_grad()
    with torch.set_grad_enabled(case.backward):
        out = _first(network(image))
    results, by_python = {"the output": out.detach()}, False
    if case.backward:
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(out.shape, generator=generator, dtype=out.dtype)
        by_python = _by_python(out)
        (out * weights * case.scale).sum().backward()  # type: ignore[no-untyped-call]
        results[f"{GRADIENT} of the image"] = _gradient(image)
        results |= {
            f"{GRADIENT} of {names[name]}": _gradient(parameter)
            for name, parameter in network.named_parameters(remove_duplicate=False)
            if name in names and parameter.requires_grad
        }
    buffers = network.named_buffers()
    results |= {f"buffer {names.get(name, name)}": buffer.clone() for name, buffer in buffers}
    return results, by_python


def _by_python(out: Tensor) -> bool:
    """Whether a `torch.autograd.Function` has led to a result."""
    nodes, visited = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, BackwardCFunction):
            return True
        if node is not None and node not in visited:
            visited.add(node)
            nodes += [before for before, _ in node.next_functions]
    return False


def _first(out: Any) -> Tensor:
    while not isinstance(out, Tensor):
        out = next(iter(out.values())) if isinstance(out, dict) else out[0]
    return out


def _prove_steady(subject: Subject, image: Tensor) -> None:
    def run(image: Tensor) -> Tensor:
        with _MasksKeepAll(), AsDefined(frozen=subject.frozen):  # type: ignore[no-untyped-call]
            return _first(subject.module(image))

    prove_steady(subject.module, run, image)


def _not_needed(module: nn.Module, names: Mapping[str, str]) -> set[str]:
    """Return names of batch norms' counts, and of statistics that the output does not need."""
    used = {name for name in names.values() if not name.endswith(COUNT)}
    return {
        f"buffer {path}.{name}"
        for path, part in module.named_modules()
        if isinstance(part, _BatchNorm)
        for name, _ in part.named_buffers(recurse=False)
        if f"{path}.{name}" not in used
    }


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _most(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _compare(
    subject: Subject, case: _Case, what: str, pair: tuple[Tensor, Tensor], least: float
) -> None:
    expected, actual = pair
    if expected.numel() != actual.numel():
        raise TilenetError(
            f"a network's map must grow with its image ({type(subject.module).__name__}, {what} of "
            f"{case} has the shape {tuple(expected.shape)}, layers give {tuple(actual.shape)}); "
            "use scale factors, or sizes of other maps"
        )
    expected, actual = expected.double(), actual.double()
    apart, most = _most(expected - actual.view_as(expected)), _most(expected)
    if not apart <= ROUNDING * max(most, least):
        raise subject.differs(what, case, f"differs by {apart:.2g} of {most:.2g}")


class _MasksKeepAll(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random masks keep everything, of dropout and of drop path."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("bernoulli", "bernoulli_"):
            return result.fill_(1)
        return result.fill_(ALMOST) if name in ("rand", "rand_like") else result


class _KeepsAll(nn.Module):
    """Dropout with a mask that keeps everything."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.factor = 1 / (1 - probability) if probability < 1 else 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor if self.training else x


def _keeps_all(module: nn.Module) -> nn.Module:
    return _KeepsAll(module.probability) if isinstance(module, KeyedDropout) else module
