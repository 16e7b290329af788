"""Turn a user module into a list of layers, and prove that the list is the same network."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Literal

import torch
from torch import Tensor, nn

from tilenet.adoption.export import graph_of
from tilenet.adoption.proof.cells import prove_cells, without_idle_weights
from tilenet.adoption.proof.module import Subject, prove
from tilenet.adoption.state import copied, state_of, trained_names, twins
from tilenet.adoption.ties import check_hooks, check_memory
from tilenet.adoption.values import linearise, name_of
from tilenet.errors import TilenetError
from tilenet.geometry.grid import Grid
from tilenet.geometry.halo import Context, context_of
from tilenet.geometry.layers import Cellwise, Conv, GlobalPool, Join, Layer, Norm, walk
from tilenet.geometry.maps import image_grid
from tilenet.model.network import Network, load_weights, network_to_fill, tie_weights
from tilenet.model.opaque import opaque_network

# Heights at which a graph is recorded, until one is a multiple of its strides; widths are twice.
HEIGHTS_PX = (128, 192, 256, 320, 448, 512, 1024)
HIDING = 1e-6  # factors below hide more than the proof's rounding
MOST_TRIES = 2  # that end in the same error

BatchNormMode = Literal["frozen", "step"]


@dataclass(frozen=True, repr=False)
class Adopted:
    """A network as a list of layers, and the names that its weights have in the module.

    Attributes:
        name: Name of the module's class.
        layers: The layers in the order in which they run.
        names: Name in the module of each weight and buffer of the list's network.
        bands: Channels of the image.
        classes: Channels of the output.
        state: The module's weights and buffers, by their names in the module.
        fixed: Names in the module of weights and buffers that are not trained.
        twins: First name of weights and buffers that have several in the module, by each of the
            other names.
    """

    name: str
    layers: tuple[Layer, ...]
    names: dict[str, str]
    bands: int
    classes: int
    state: dict[str, Tensor]
    fixed: frozenset[str] = frozenset()
    twins: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        far, unit = self.context.context_aligned_px, self.context.alignment_px
        return (
            f"<{self.name}: {len(self.layers)} layers, {self.bands} bands, {self.classes} classes, "
            f"looks {far} px around aligned tiles of {unit} px>"
        )

    @property
    def context(self) -> Context:
        """Context that each pixel needs, besides averages of the whole image."""
        return context_of(self.layers)

    @property
    def looks_at_all(self) -> bool:
        """Whether it takes averages or statistics of the whole image."""
        return any(
            isinstance(layer, GlobalPool) or (isinstance(layer, Norm) and layer.scope == "image")
            for layer in self.layers
        )

    @property
    def shared(self) -> dict[str, tuple[str, ...]]:
        """Trained weights that the list holds several times: its own names, by the module's."""
        own: dict[str, tuple[str, ...]] = {}
        for name, of_module in self.names.items():
            own[of_module] = (*own.get(of_module, ()), name)
        trained = own.keys() - self.fixed
        return {name: of for name, of in own.items() if len(of) > 1 and name in trained}

    @property
    def together(self) -> dict[str, tuple[int, int]]:
        """First and last of the layers that share a trained weight, by the weight's name."""
        layers = {n: [int(w.split(".")[0]) for w in own] for n, own in self.shared.items()}
        return {name: (min(of), max(of)) for name, of in layers.items()}

    @property
    def num_parameters(self) -> int:
        """Trained values, each counted once."""
        return sum(self.state[name].numel() for name in {*self.names.values()} - self.fixed)

    @property
    def precision(self) -> Literal["float32", "float64"]:
        """`float64` where the module holds such weights, else `float32`."""
        double = any(tensor.dtype == torch.float64 for tensor in self.state.values())
        return "float64" if double else "float32"

    def network(self, dtype: torch.dtype = torch.float32) -> Network:
        """The list's network with the module's weights."""
        network = network_to_fill(self.layers, dtype)
        self.fill(network)
        return network

    def around(self, module: nn.Module, seed: int, precision: str) -> Network:
        """Build the network around the opaque module, which is taken over, with these weights."""
        network = opaque_network(module, seed, precision)
        self.fill(network)
        return network

    def fill(self, network: Network) -> None:
        """Give the list's network the module's weights, to be trained.

        Fixed ones require no gradient; trained ones that layers share are one parameter.
        """
        load_weights(network, self.state, self.name, self.names)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(self.names[name] not in self.fixed)
        tie_weights(network, self.shared.values())

    def module_state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A network's `state_dict()` under the module's own names, for its `load_state_dict`.

        Weights that the network does not use are the module's.
        """
        trained = {
            self.names[name]: tensor.view(self.state[self.names[name]].shape)
            for name, tensor in weights.items()
        }
        twins = {name: trained[own].clone() for name, own in self.twins.items() if own in trained}
        return {**self.state, **trained, **twins}


@contextmanager
def own_settings() -> Iterator[None]:
    """Record gradients, without autocast, and make tensors on the CPU where no device is named.

    Whatever a program set; partitions enter an autocast of their own.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda", "xpu")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


ONE_AT_A_TIME = RLock()  # random numbers, and what torch prints while it exports, are the process's


def adopt(module: nn.Module, bands: int, batch_norm: BatchNormMode = "frozen") -> Adopted:
    """Turn a network into a list of layers that gives one result on any tiles and ranks.

    The list and the module are then run on random images of two sizes in float64, in training
    (forward and backward) and in evaluation, and must agree to rounding.

    Args:
        module: Maps images (B, bands, H, W) to a map (B, classes, H, W), which it returns alone or
            first. It is not changed. Where only some of its parts are in evaluation mode (a frozen
            encoder), these stay in it: they drop nothing, and their batch norms are frozen. If all
            are, it counts as a module in training. Weights that require no gradient, or that no
            gradient reaches, are not trained.
        bands: Channels of the images.
        batch_norm: `frozen`: batch norm uses its running statistics, in training too; `step`: it
            takes statistics of the images of a step.

    Raises:
        TilenetError: An operator cannot be a layer (its submodule and name are in the error), or
            the list differs from the module.
    """
    if bands < 1:
        raise TilenetError(f"an image has at least one band (bands: {bands})")
    alone = torch.random.fork_rng(devices=[])  # a program's own random numbers stay the same
    with ONE_AT_A_TIME, alone, own_settings():
        mine = copied(module)
        layers, names = _recorded(mine, bands, batch_norm)
        try:
            adopted = _adopted(module, mine, without_idle_weights(layers, names), names, bands)
            prove_cells(layers)
            unreached = prove(_subject(mine, adopted, batch_norm))
        except TilenetError:
            raise
        except Exception as error:  # a user's forward may raise anything
            raise TilenetError(
                f"a network runs in float64 and on images of other sizes ({type(module).__name__}: "
                f"{type(error).__name__}: {' '.join(str(error).split())[:200]}); use one that does"
            ) from error
    return replace(adopted, fixed=adopted.fixed | unreached)


def _adopted(
    module: nn.Module,
    ran: nn.Module,
    layers: tuple[Layer, ...],
    names: dict[str, str],
    bands: int,
) -> Adopted:
    """The list, with weights of the module, and those trained that a copy trains after it ran."""
    idle = {
        names[name_of(number, layer, weight)]
        for number, layer in enumerate(layers)
        if isinstance(layer, Cellwise | Conv)
        for weight, _, learns in layer.weights
        if not learns
    }
    adopted = Adopted(
        type(module).__name__,
        layers,
        names,
        bands,
        layers[-1].out_channels,
        state_of(module),
        (frozenset(names.values()) - trained_names(ran)) | idle,
        twins(module),
    )
    _check_weights(adopted)
    check_hooks(module, names.values())
    check_memory(module, names.values())
    return adopted


def _subject(module: nn.Module, adopted: Adopted, batch_norm: str) -> Subject:
    """The module and its list in float64, with weights as exact as the module's own.

    Only trained weights near 0 are other numbers.
    """
    module = module.double()
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            # float32 has been copied exactly
            if isinstance(tensor, Tensor) and adopted.state[name].dtype == torch.float64:
                tensor.copy_(adopted.state[name])
        _without_zeros(module)
    return Subject(
        module,
        replace(adopted, state=state_of(module)).network(torch.float64).train(),
        adopted.names,
        adopted.bands,
        adopted.context.alignment_px,
        batch_norm == "frozen",
    )


def _without_zeros(module: nn.Module) -> None:
    """Replace trained weights near 0: a gate that begins at 0 hides all that lies behind it."""
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        if weight.requires_grad and weight.is_floating_point():
            drawn = torch.rand(weight.shape, generator=generator, dtype=weight.dtype) / 10 + 0.05
            inputs = weight[0].numel() if weight.dim() > 1 else 1
            near = weight.abs() < HIDING
            weight[near] = drawn[near] / inputs


def _check_weights(adopted: Adopted) -> None:
    """Refuse weights that no state holds, or that are sparse, and statistics of several maps."""
    for name, tensor in adopted.state.items():
        if tensor.layout != torch.strided:
            raise TilenetError(
                f"a network's weights and buffers are dense ({name} of {adopted.name} is "
                f"{tensor.layout}); use to_dense()"
            )
    blended: set[str] = set()
    for own, name in adopted.names.items():
        layer = adopted.layers[int(own.split(".")[0])]
        if isinstance(layer, Norm) and layer.scope == "image" and own.endswith(".running_mean"):
            if name in blended:
                raise TilenetError(
                    f"statistics of a step are those of one map ({name} of {adopted.name} is "
                    "blended with several); use batch_norm: frozen, or a norm for each"
                )
            blended.add(name)
        if name not in adopted.state:
            raise TilenetError(
                f"a network's weights are in its state_dict() ({name} of {adopted.name} is not); "
                "register it as a persistent buffer, or use the norms of torch.nn"
            )


def _recorded(
    module: nn.Module, bands: int, batch_norm: str
) -> tuple[tuple[Layer, ...], dict[str, str]]:
    """Record at the smallest size that all strides divide."""
    reasons: list[str] = []
    for height in HEIGHTS_PX:
        try:
            linear = linearise(graph_of(module, bands, (height, 2 * height), batch_norm))
            if not linear.layers:
                raise TilenetError(
                    f"a network has layers ({type(module).__name__} gives the image back)"
                )
            _check_places(linear.layers)
            unit = context_of(linear.layers).alignment_px
            if height % unit == 0:
                return linear.layers, linear.names
            reasons.append(f"a network's strides divide {max(HEIGHTS_PX)} px (they make {unit} px)")
        except TilenetError as error:
            # At sizes that a stride does not divide, maps do not fit each other.
            reasons.append(str(error))
        except Exception as error:  # a graph of an unknown form
            reasons.append(
                f"a network's graph must be a list of layers ({type(module).__name__}: "
                f"{type(error).__name__}: {' '.join(str(error).split())[:200]}); report it, please"
            )
        if reasons.count(reasons[-1]) == MOST_TRIES:
            break
    raise TilenetError(reasons[0])


def _check_places(layers: tuple[Layer, ...]) -> None:
    """Refuse maps that are joined cell by cell, but do not lie on each other.

    This happens where maps lose cells at their edges before different strides.
    """

    def through(layer: Layer, grid: Grid, stashed: tuple[Grid, ...]) -> Grid:
        out = layer.grid(grid, *stashed)
        if isinstance(layer, Join):
            joined = stashed if layer.how == "take" else (grid, *stashed)
            apart = [other for other in joined if not (other.whole or out.whole or other == out)]
            if apart:
                raise TilenetError(
                    f"maps that are joined lie on the same cells (a map's cells are {out.stride} "
                    f"px from pixel {out.origin} on, another's {apart[0].stride} px from pixel "
                    f"{apart[0].origin} on); use a network whose layers pad alike on both ways"
                )
        return out

    end = walk(layers, image_grid(layers), through)[-1]
    if end != Grid():
        raise TilenetError(
            "a network gives one cell per input pixel, and its map begins where the image does "
            f"(its cells are {end.stride} px, the first stands at pixel {end.origin}); use a "
            "network whose layers pad as much as they look around"
        )
