"""Random networks, each made from a seed: parts down, parts up, skips, random graphs, wrappers.

All maps have the same number of channels, so that any two of a level can be joined, and any part
that keeps the size can be left out: that is how a failing module is made smaller.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import parts_that_move  # noqa: F401 (enters its parts)
import parts_that_share  # noqa: F401 (enters its parts)
import parts_within_cells  # noqa: F401 (enters its parts)
import torch
import torch.nn.functional as F
from draw import Draw
from parts import DOWN, KEEP, RARE, STEM, UP, WIDE, Part, conv, enlarged
from torch import Tensor, nn

__all__ = ["BANDS", "WRAPPER", "Generated", "generate"]

BANDS = 3
WRAPPER_PX = 32
NOTHING = "nothing"
WRAPPER = -1  # its number among the steps to leave out


@dataclass(frozen=True)
class Step:
    """A part, the maps that it takes, by their numbers, and what it is called."""

    part: nn.Module
    inputs: tuple[int, ...]
    words: str
    optional: bool


class Generated(nn.Module):
    """A graph of parts; map 0 is the image, map n + 1 what step n makes."""

    def __init__(self, steps: list[Step], wrapper: str, output: str, stride: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(step.part for step in steps)
        self.wiring = [step.inputs for step in steps]
        self.words = [step.words for step in steps]
        self.optional = [number for number, step in enumerate(steps) if step.optional]
        self.wrapper, self.output, self.stride = wrapper, output, stride

    def forward(self, x: Tensor) -> Any:
        rows, cols = x.shape[2], x.shape[3]
        if self.wrapper != "none":
            below, right = -rows % WRAPPER_PX, -cols % WRAPPER_PX
            if below or right:
                x = F.pad(x, [0, right, 0, below], mode=self.wrapper)
        maps = [x]
        for part, inputs in zip(self.parts, self.wiring, strict=True):
            maps.append(part(*(maps[number] for number in inputs)))
        out = maps[-1]
        if self.wrapper != "none":
            out = out[:, :, :rows, :cols]
        match self.output:
            case "dict":
                return {"out": out, "aux": maps[1]}
            case "tuple":
                return out, maps[1]
            case "list":
                return [out]
        return out

    def describe(self) -> str:
        """One line per step; those that are left out are not named."""
        same, lines = [0], []
        for number, (words, inputs) in enumerate(zip(self.words, self.wiring, strict=True)):
            of = [same[one] for one in inputs]
            same.append(number + 1 if words != NOTHING else of[0])
            if words != NOTHING:
                lines.append(f"  {number + 1} = {words} of {', '.join(map(str, of))}")
        return "\n".join([f"  wrapper {self.wrapper}, output {self.output}", *lines])


class _Builder:
    """Steps so far, and the maps of each level."""

    def __init__(self, seed: int) -> None:
        self.draw = Draw(seed)
        self.steps: list[Step] = []
        self.levels = [0]  # of each map, the image's first; a level halves the size

    def add(
        self, name: str, part: nn.Module, *inputs: int, by: int = 0, optional: bool = False
    ) -> int:
        words = " ".join([name, *self.draw.words])
        self.draw.words.clear()
        self.steps.append(Step(part, inputs, words, optional))
        self.levels.append(self.levels[inputs[0]] + by)
        return len(self.steps)

    def drawn(self, table: dict[str, Any], *inputs: int, by: int = 0) -> int:
        name = self.draw.random.choice(list(table))
        return self.add(name, table[name](self.draw), *inputs, by=by, optional=by == 0)

    def kept(self, x: int, most: int) -> int:
        for _ in range(self.draw.random.randint(0, most)):
            x = self.part(x)
        return x

    def part(self, x: int) -> int:
        """One that keeps the size."""
        return self.drawn(RARE if self.draw.bold and self.draw.chance(0.25) else KEEP, x)

    def joined(self, x: int, other: int) -> int:
        """Two maps of a level."""
        how = self.draw.of("how", "cat", "cat first", "add", "mul", "gate")
        if how.startswith("cat"):
            part = Part(
                (lambda m, a, b: m.conv(torch.cat([a, b], 1)))
                if how == "cat"
                else (lambda m, a, b: m.conv(torch.cat([b, a], 1))),
                conv=conv(self.draw.of("k", 1, 3), 2 * WIDE),
            )
        elif how == "add":
            part = Part(lambda m, a, b: a + b)
        elif how == "mul":
            part = Part(lambda m, a, b: a * b.tanh())
        else:
            part = Part(
                lambda m, a, b: a * m.conv(b.mean((2, 3), keepdim=True)).sigmoid(), conv=conv(1)
            )
        return self.add("join", part, x, other, optional=True)

    def graph(self, x: int) -> int:
        """A few random sums, products and parts over all maps of the level."""
        level = self.levels[x]
        for _ in range(self.draw.random.randint(1, 4)):
            near = [n for n in range(1, len(self.levels)) if self.levels[n] == level]
            if self.draw.chance(0.4):
                x = self.part(self.draw.random.choice(near))
            else:
                x = self.joined(x, self.draw.random.choice(near))
        return x


def _steps(seed: int) -> tuple[list[Step], str, str, int]:
    builder = _Builder(seed)
    draw = builder.draw
    depth = draw.random.choices([0, 1, 2, 3], [25, 40, 25, 10])[0]
    if depth == 0 or draw.chance(0.3):
        kernel = draw.of("k", 1, 3, 3, 5)
        x = builder.add("first", conv(kernel, BANDS), 0)
    else:
        x = builder.drawn(STEM, 0, by=1)
    skips = []
    while builder.levels[x] < depth:
        x = builder.kept(x, 1)
        skips.append(x)
        x = builder.drawn(DOWN, x, by=1)
    x = builder.kept(x, 2)
    if draw.chance(0.4):
        x = builder.graph(x)
    while builder.levels[x] > 0:
        if draw.chance(0.1):  # to the image's size at once
            mode, times = draw.of("mode", "nearest", "bilinear", "corners"), builder.levels[x]

            def enlarge(m: Any, x: Tensor, image: Tensor, mode: str = mode) -> Tensor:
                return enlarged(x, image.shape[2:], mode)

            x = builder.add("enlarged to the image", Part(enlarge), x, 0, by=-times)
        else:
            x = builder.drawn(UP, x, by=-1)
        near = [skip for skip in skips if builder.levels[skip] == builder.levels[x]]
        if near and draw.chance(0.7):
            x = builder.joined(x, near[0])
        x = builder.kept(x, 1)
    if draw.chance(0.2):
        x = builder.graph(x)
    builder.add("head", conv(draw.of("k", 1, 3), WIDE, draw.of("classes", 2, 3)), x)
    wrapper = draw.random.choices(["none", "constant", "replicate"], [85, 12, 3])[0]
    wrapper = wrapper if draw.bold else "none"
    output = draw.random.choices(["map", "dict", "tuple", "list"], [70, 10, 10, 10])[0]
    strides = [
        2 ** builder.levels[step.inputs[0]] * getattr(step.part, "divides", 1)
        for step in builder.steps
    ]
    return builder.steps, wrapper, output, max(2 ** max(builder.levels), *strides)


def generate(seed: int, without: Collection[int] = ()) -> Generated:
    """The module of a seed.

    Args:
        without: Numbers of optional steps, counted from 0, that hand on their first map instead, or
            `WRAPPER`. Other steps stay as they are, with their weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        steps, wrapper, output, stride = _steps(seed)
    for number in without:
        if number == WRAPPER:
            wrapper = "none"
            continue
        inputs = steps[number].inputs[:1]
        steps[number] = Step(nn.Identity(), inputs, NOTHING, optional=False)
    module = Generated(steps, wrapper, output, stride)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # Zeros and ones hide mistakes; drawn by name, so that steps left out change no other.
        for name, tensor in module.state_dict().items():
            if tensor.dim() == 1 and tensor.is_floating_point():
                generator.manual_seed(seed * 1000 + sum(map(ord, name)))
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return module
