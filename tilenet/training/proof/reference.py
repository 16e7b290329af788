"""The answer of a user's network on small whole images: logits and gradients, without dropout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tilenet.adoption.adopt import Adopted
from tilenet.adoption.proof.as_defined import AsDefined
from tilenet.errors import one_line
from tilenet.geometry.layers import Layer
from tilenet.geometry.tiles import Tiling
from tilenet.model.dropout import KeyedDropout
from tilenet.model.network import Network
from tilenet.parallel.proof import largest, scale_of, with_zeros

FAR = 2.0**20  # factor of the pixels that a tile does not read


@dataclass(frozen=True)
class Problem:
    """A computation that the module and the ranks both do.

    Attributes:
        tiling: Tiling of the small image.
        random: Random images (N, bands, H, W).
        weights: Weights (N, classes, H, W) of the outputs; the loss is their sum.
        each: Number of images of a replica.
        replicas: Number of replicas with different images.
        chosen: Numbers of the tiles that are computed, forward; None: all, forward and backward.
        zeros: Whether the images have a block of zeros.
    """

    tiling: Tiling
    random: Tensor
    weights: Tensor
    each: int
    replicas: int = 1
    chosen: Sequence[int] | None = None
    zeros: bool = False

    @property
    def images(self) -> Tensor:
        """The images that are computed, (N, bands, H, W)."""
        return with_zeros(self.random) if self.zeros else self.random

    def of(self, replica: int) -> list[int]:
        """Numbers of a replica's images."""
        first = replica % self.replicas * self.each
        return list(range(first, first + self.each))


def random_problem(
    tiling: Tiling,
    layers: tuple[Layer, ...],
    each: int,
    replicas: int = 1,
    chosen: Sequence[int] | None = None,
) -> Problem:
    """A problem of random images and weights, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    images, weights = (
        torch.randn(
            (each * replicas, channels, *tiling.extended), generator=generator, dtype=torch.float64
        )
        for channels in (layers[0].in_channels, layers[-1].out_channels)
    )
    for number in chosen or ():
        read = tiling.tiles[number].read
        inside = torch.zeros(tiling.extended, dtype=torch.bool)
        inside[read.row : read.row + read.height, read.col : read.col + read.width] = True
        # Pixels at the edge of a deep network's context have little influence: large ones show.
        images *= torch.where(inside, 1.0, FAR)
    return Problem(tiling, images, weights, each, replicas, chosen, zeros=chosen is None)


@dataclass(frozen=True)
class Answer:
    """Logits and the gradients of weights, by the module's names; on rank 0.

    Attributes:
        zeros: Whether the images had the block of zeros.
    """

    logits: Tensor
    gradients: Mapping[str, Tensor]
    zeros: bool


def answer_of_module(
    module: nn.Module | None, adopted: Adopted, batch_norm: str | None, problem: Problem
) -> tuple[Answer | None, str]:
    """The answer of the module in float64, and the reason if there is none.

    Where it is not finite on images with zeros, it is the answer without them.

    Args:
        module: The module, which this changes; None: the list of layers answers instead.
    """
    norms = [] if module is None or batch_norm != "step" else _trained_norms(module)
    for zeros in (True, False)[not problem.zeros :]:
        problem = replace(problem, zeros=zeros)
        try:
            answer = _answer_in_float64(module, adopted, norms, problem)
        except Exception as error:  # a user's forward may raise anything on an image this small
            height, width = problem.tiling.extended
            return None, (
                f"{adopted.name} cannot take {height} × {width} px in float64 "
                f"({type(error).__name__}: {one_line(str(error))[:200]})"
            )
        if answer.logits.shape != problem.weights.shape:
            return None, f"{adopted.name} gives a map of the shape {tuple(answer.logits.shape)}"
        if all(bool(t.isfinite().all()) for t in (answer.logits, *answer.gradients.values())):
            return answer, ""
    return None, f"{adopted.name} gives values without end"


def _trained_norms(module: nn.Module) -> list[nn.Module]:
    """Batch norms that take statistics of the step; all, of a module in evaluation."""
    modes = {part.training for part in module.modules()}
    return [
        part
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and (part.training or len(modes) == 1)
    ]


def _answer_in_float64(
    module: nn.Module | None, adopted: Adopted, norms: Sequence[nn.Module], problem: Problem
) -> Answer:
    if module is None:
        return _answer_of_list(adopted, problem, torch.float64, torch.device("cpu"))
    module = module.cpu().double().eval()
    for part in norms:
        part.train()
    return _answer(module, problem, adopted.names.values())


def rounding_of(
    adopted: Adopted, problem: Problem, answer: Answer, device: torch.device
) -> tuple[float, float]:
    """Difference between float32 and float64 on one device, as `Difference.apart`."""
    return _apart(_answer_of_list(adopted, problem, torch.float32, device), answer)


def own_rounding(adopted: Adopted, problem: Problem, answer: Answer) -> tuple[float, float]:
    """Difference made by rounding the image, in float64, as `Difference.apart`."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(problem.random.shape, generator=generator, dtype=torch.float64)
    noisy = replace(problem, random=problem.random * (1 + 1e-15 * noise))
    return _apart(_answer_of_list(adopted, noisy, torch.float64, torch.device("cpu")), answer)


def _apart(computed: Answer, answer: Answer) -> tuple[float, float]:
    gradients = [
        largest(computed.gradients[name], expected)
        for name, expected in answer.gradients.items()
        if name in computed.gradients
    ]
    scale = scale_of(answer.gradients.values())
    logits = largest(computed.logits, answer.logits) / scale_of([answer.logits])
    return logits, max(gradients, default=0.0) / scale


def _answer_of_list(
    adopted: Adopted, problem: Problem, dtype: torch.dtype, device: torch.device
) -> Answer:
    network = without_dropout(adopted.network(dtype).to(device).train())
    return _answer(network, problem, adopted.names.values(), adopted.names)


def without_dropout(network: Network) -> Network:
    for part in network.modules():
        if isinstance(part, KeyedDropout):
            part.probability = 0.0
    return network


def _answer(
    network: nn.Module,
    problem: Problem,
    trained: Any,
    names: Mapping[str, str] | None = None,
) -> Answer:
    """Run forward and backward on the whole images.

    Args:
        trained: Names in the module of the weights that need gradients.
        names: Name in the module of each of the network's weights; None: its own.
    """
    like = next(network.parameters())
    network.zero_grad()
    with AsDefined(drops=False), torch.set_grad_enabled(problem.chosen is None):
        out = network(problem.images.to(like, copy=True))
        while not isinstance(out, Tensor):
            out = next(iter(out.values())) if isinstance(out, dict) else out[0]
        if out.requires_grad:
            (out * problem.weights.to(out)).sum().backward()  # type: ignore[no-untyped-call]
    counted, gradients = set(trained), {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        name = name if names is None else names[name]
        if name in counted and parameter.grad is not None:
            gradients[name] = parameter.grad.double().cpu()
    return Answer(out.detach().double().cpu(), gradients, problem.zeros)
