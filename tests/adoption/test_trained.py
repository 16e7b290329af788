"""The weights of a list that are trained are those that the module trains, by themselves alone."""

from collections.abc import Callable

import pytest
import torch
from one_idea import Around
from torch import Tensor, nn

from tilenet.adoption.adopt import adopt
from tilenet.adoption.opaque import take_as_it_is
from tilenet.errors import TilenetError

CONV = frozenset({"conv.weight", "conv.bias"})

# What no gradient reaches has none in torch, and its optimizers leave it: not even decay moves it.
UNREACHED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a map without its gradient": lambda m, x: m.head(x.detach()),
    "a comparison": lambda m, x: m.head((x > 0).to(x.dtype)),
}


@pytest.mark.parametrize("name", UNREACHED)
def test_what_no_gradient_reaches_is_not_trained(name: str) -> None:
    adopted = adopt(Around(UNREACHED[name], head=nn.Conv2d(4, 2, 1)), 3)
    assert adopted.fixed == CONV
    fixed = {n for n, p in adopted.network().named_parameters() if not p.requires_grad}
    assert {adopted.names[n] for n in fixed} == CONV


def test_what_a_part_of_the_gradient_reaches_is_trained() -> None:
    adopted = adopt(Around(lambda m, x: m.head(x + x.detach()), head=nn.Conv2d(4, 2, 1)), 3)
    assert not adopted.fixed


class FixedByTrain(Around):
    def train(self, mode: bool = True) -> "FixedByTrain":
        super().train(mode)
        self.conv.requires_grad_(False)
        return self


def fixes(module: Around, x: Tensor) -> Tensor:
    module.conv.requires_grad_(False)
    return module.head(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedByTrain(lambda m, x: m.head(x), head=nn.Conv2d(4, 2, 1)),
        lambda: Around(fixes, head=nn.Conv2d(4, 2, 1)),
    ],
)
def test_what_train_or_forward_fixes_is_fixed(make: Callable[[], nn.Module]) -> None:
    module = make()
    assert adopt(module, 3).fixed == CONV


def test_of_an_opaque_module_no_other_weights_are_trained() -> None:
    def forward(module: Around, x: Tensor) -> Tensor:
        x = module.sometimes(x) if torch.rand(()) < 0.2 else x
        return module.head(x.flip(2) + module.of_map(x).detach())

    convs = {name: nn.Conv2d(4, 4, 1) for name in ("sometimes", "of_map", "idle")}
    module = FixedByTrain(forward, head=nn.Conv2d(4, 2, 1), **convs)
    fixed = {f"{name}.{kind}" for name in ("of_map", "idle") for kind in ("weight", "bias")}
    assert take_as_it_is(module, 3, 32, "nets:net").fixed == CONV | fixed


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_weights_are_refused(kind: str) -> None:
    module = Around(lambda m, x: x)
    getattr(module.conv.weight, kind)(lambda gradient: None)
    with pytest.raises(TilenetError, match=r"conv\.weight of Around has a hook"):
        adopt(module, 3)


def hooked(module: Around, x: Tensor) -> Tensor:
    if module.conv.weight.requires_grad and torch.is_grad_enabled():
        module.conv.weight.register_hook(lambda gradient: gradient)
    return x


def test_a_hook_that_forward_adds_is_refused() -> None:
    with pytest.raises(TilenetError, match=r"conv\.weight of Around has a hook"):
        adopt(Around(hooked), 3)


def test_hooks_of_what_is_not_trained_are_not_refused() -> None:
    module = Around(lambda m, x: m.head(x), head=nn.Conv2d(4, 2, 1), idle=nn.Conv2d(4, 2, 1))
    for conv in (module.conv, module.idle):
        conv.weight.register_hook(lambda gradient: gradient)
    module.conv.requires_grad_(False)
    assert adopt(module, 3).fixed == CONV


def by_data() -> nn.Module:
    network = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(2)))
    network[1].weight.data = network[0].weight.data
    return network


def transposed() -> nn.Module:
    network = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(2)))
    network[1].weight = nn.Parameter(network[0].weight.transpose(0, 1))
    return network


def a_buffer() -> nn.Module:
    module = Around(lambda m, x: x * m.of.view(1, -1, 1, 1))
    module.register_buffer("of", module.conv.bias.data)
    return module


def a_passing_buffer() -> nn.Module:
    module = Around(lambda m, x: x * m.of.view(1, -1, 1, 1))
    module.register_buffer("of", module.conv.bias.data, persistent=False)
    return module


def in_a_list() -> nn.Module:
    module = Around(lambda m, x: x * m.of[0].view(1, -1, 1, 1))
    module.of = [module.conv.bias.data]
    return module


@pytest.mark.parametrize("make", [by_data, transposed, a_buffer, a_passing_buffer, in_a_list])
def test_weights_that_share_memory_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(TilenetError, match="two tensors that share memory"):
        adopt(make(), 3)


def test_weights_that_lie_side_by_side_in_one_memory_are_adopted() -> None:
    network = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(2)))
    memory = torch.rand(2, 3, 3, 1, 1)
    for conv, part in zip(network, memory, strict=True):
        conv.weight = nn.Parameter(part)
    assert not adopt(network, 3).fixed
    for number, conv in enumerate(network):  # in turns
        conv.bias = nn.Parameter(memory.flatten()[number : number + 6 : 2])
    with pytest.raises(TilenetError, match="share memory"):
        adopt(network, 3)
    memory = torch.rand(6)
    for number, conv in enumerate(network):
        conv.bias = nn.Parameter(memory[number::2])
    assert not adopt(network, 3).fixed


def test_a_buffer_of_booleans_is_refused_in_a_sentence() -> None:
    marks = torch.tensor([True, False, True, True]).view(4, 1, 1)
    with pytest.raises(TilenetError, match="not of floating-point numbers"):
        adopt(Around(lambda m, x: x.masked_fill(m.marks, 0.0), marks=marks), 3)
