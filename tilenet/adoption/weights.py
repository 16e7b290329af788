"""Weights of a file in a module, also under names with `model.` or `encoder.` in front."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tilenet.errors import TilenetError, one_line

MOST_NAMED = 3  # names that a sentence holds
HOLDERS = ("state_dict", "model_state_dict", "model", "net", "network", "weights")
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
NUMBERED = re.compile(r"_(?=\d+(\.|$))")  # timm's feature extractors write stages_0 for stages.0

Words = tuple[str, ...]


@dataclass(frozen=True)
class Fit:
    """A beginning of names in a file, the one in the module that it stands for, and the places.

    Attributes:
        source: First words of the names in the file that those in the module lack.
        target: First words of the names in the module in place of these.
        places: Name in the module for each name in the file; shapes are equal.
    """

    source: Words
    target: Words
    places: dict[str, str]

    def __str__(self) -> str:
        return f"{'.'.join(self.source) or 'the file'} as {'.'.join(self.target) or 'the network'}"


def load_partial_weights(module: nn.Module, path: Path) -> str:
    """Fill in weights of a file, of the whole module or of one part of it, such as its encoder.

    Returns:
        A sentence on what was filled in.

    Raises:
        TilenetError: The file cannot be read, a shape differs, or less than half of the file's
            weights have a place in the module, or two places.
    """
    tensors = _read(path)
    state = {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and not nn.parameter.is_lazy(tensor)
    }
    fit = _best_fit(tensors, state, path)
    for name in fit.places:
        if tensors[name].is_floating_point() and not tensors[name].isfinite().all():
            raise TilenetError(
                f"weights are finite numbers ({path}: {name} holds others); use another file"
            )
    module.load_state_dict({place: tensors[n] for n, place in fit.places.items()}, strict=False)
    filled = {id(state[place]) for place in fit.places.values()}
    left = [name for name in tensors if name not in fit.places]
    stay = [name for name, tensor in state.items() if id(tensor) not in filled]
    return (
        f"{path}: {len(fit.places)} of {len(tensors)} tensors are filled in"
        + (f" ({fit})" if fit.source or fit.target else "")
        + (f"; {len(left)} of the file have no place ({_first(left)})" if left else "")
        + (f"; {len(stay)} of the network stay as made ({_first(stay)})" if stay else "")
    )


def _best_fit(tensors: dict[str, Tensor], state: dict[str, Tensor], path: Path) -> Fit:
    """Return the fit of most tensors; among equal ones, the one that changes the fewest words.

    Raises:
        TilenetError: Shapes differ, less than half of the file has a place, or two fits are equal.
    """
    fits = _fits(tensors, state, shaped=True)
    best = fits[0] if fits else Fit((), (), {})
    if 2 * len(best.places) < len(tensors) or not best.places:
        likely = next(iter(_fits(tensors, state, shaped=False)), best)
        if 2 * len(likely.places) < len(tensors) or not likely.places:
            raise TilenetError(
                f"weights belong to the network ({path} holds {len(tensors)}, such as "
                f"{_first(tensors)}, of which {len(likely.places)} have a place; the network has "
                f"{_first(state)} and so on); name weights of the same network, or of a part of it"
            )
        best = likely
    names_by_words = {words: name for name, words in _words(state).items()}
    for name, words in _words(tensors).items():
        place = names_by_words.get((*best.target, *words[len(best.source) :]), "")
        if words[: len(best.source)] != best.source or place not in state:
            continue
        if tensors[name].shape != state[place].shape:
            raise TilenetError(
                f"weights have the shapes of the network's ({path}: {name} is "
                f"{tuple(tensors[name].shape)} there and {tuple(state[place].shape)} in the "
                "network); use weights that were trained with as many bands and classes, or leave "
                "this one out of the file"
            )
    for rival in fits[1:]:
        if len(rival.places) == len(best.places) and _differ(best, rival, state):
            raise TilenetError(
                f"weights belong to one place of the network ({path}: {best} and {rival} fit alike "
                f"with {len(best.places)} tensors); save one of them under the network's own "
                "names"
            )
    return best


def _differ(best: Fit, rival: Fit, state: Mapping[str, Tensor]) -> bool:
    """Whether a fit of as many tensors is as likely, and fills in others or other tensors.

    Names as they are, or less a beginning, are likelier than those that lose or get more words.
    """
    start = len(best.source)
    if rival.source[:start] == best.source and (len(rival.source) > start or not best.target):
        return False
    places = {name: id(state[place]) for name, place in best.places.items()}
    return places != {name: id(state[place]) for name, place in rival.places.items()}


def _fits(tensors: dict[str, Tensor], state: dict[str, Tensor], *, shaped: bool) -> list[Fit]:
    """Each way to exchange the beginning of names, by how many tensors it gives a place to.

    A tensor and a place that end alike vote for the exchange of the words before.

    Args:
        shaped: Only places of a tensor's shape count, else those of as many dimensions.
    """

    def end(words: Words, tensor: Tensor) -> tuple[str, int | torch.Size]:
        return words[-1], tensor.shape if shaped else tensor.dim()

    ends = defaultdict(list)
    for place, words in _words(state).items():
        ends[end(words, state[place])].append((words, place))
    places: dict[tuple[Words, Words], dict[str, str]] = defaultdict(dict)
    for name, words in _words(tensors).items():
        for target, place in ends[end(words, tensors[name])]:
            pairs = zip(reversed(words), reversed(target), strict=False)
            alike = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
            alike = min(len(words), len(target)) if alike is None else alike
            places[words[:-alike], target[:-alike]][name] = place
    fits = [Fit(source, target, each) for (source, target), each in places.items()]
    return sorted(fits, key=lambda fit: (-len(fit.places), len(fit.source), len(fit.target)))


def _words(names: Iterable[str]) -> dict[str, Words]:
    """The words of names without those of wrappers, which DDP and compile put between them."""
    names = list(names)
    split = {name: tuple(NUMBERED.sub(".", name).split(".")) for name in names}
    bare = {
        name: (*(word for word in words[:-1] if word not in WRAPPERS), words[-1])
        for name, words in split.items()
    }
    for each in (bare, split):
        if len(set(each.values())) == len(names):
            return each
    return {name: tuple(name.split(".")) for name in names}


def _read(path: Path) -> dict[str, Tensor]:
    """Tensors of a file, by name; a file of torch's may hold them within other things.

    Raises:
        TilenetError: It cannot be read, needs code, or holds no tensors by their names.
    """
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        if code:
            raise TilenetError(
                f"a file of weights holds tensors and plain values ({path}: {code[1]}, which would "
                f"run code as it is read); where you trust it, save its tensors alone: "
                f'torch.save(torch.load("{path.name}", weights_only=False)["state_dict"], '
                '"plain.pth")'
            ) from error
        raise TilenetError(
            f"weights are a file of safetensors, or of torch.save without code ({path}: "
            f"{type(error).__name__}: {one_line(str(error))[:200]}); save its state_dict() again"
        ) from error
    tensors = _within(content)
    if not tensors:
        keys = f" of {_first(map(str, content))}" if isinstance(content, Mapping) else ""
        raise TilenetError(
            f"a file of weights holds tensors by their names ({path}: {type(content).__name__}"
            f"{keys}); save module.state_dict()"
        )
    return tensors


def _within(content: Any, depth: int = 3) -> dict[str, Tensor]:
    """Tensors by name: those under a usual name, else those of the content itself."""
    if not isinstance(content, Mapping) or depth == 0:
        return {}
    for holder in HOLDERS:
        if tensors := _within(content.get(holder), depth - 1):
            return tensors
    return {
        name: tensor
        for name, tensor in content.items()
        if isinstance(name, str) and isinstance(tensor, Tensor)
    }


def _first(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join([*names[:MOST_NAMED], *["…"] * (len(names) > MOST_NAMED)]) or "none"
