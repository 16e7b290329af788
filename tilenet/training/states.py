"""States of an optimizer, whole in checkpoints, also where ranks share them out.

They are checked before a run continues with them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tilenet.errors import TilenetError
from tilenet.model.dtypes import parameter_dtype
from tilenet.model.network import Network
from tilenet.parallel.sums.shares import Part, Shares
from tilenet.planning.memory.states import sharers
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.config.keys import OptimizerKeys
from tilenet.training.optimizer import EagerAdamW, EagerSGD


def sharers_of(
    optimizer: OptimizerKeys, record: NetworkRecord, ranks: int, filled: Network | None = None
) -> int:
    """Number of ranks that share out the optimizer's states; 1: each keeps all of them.

    Args:
        record: Record of the network.
        ranks: Number of ranks of the run.
        filled: The network; None: its layers say how many weights it has.
    """
    if filled is None:
        item = parameter_dtype(record.precision).itemsize
        weights = item * sum(layer.num_parameters for layer in record.layers)
    else:
        weights = sum(parameter.nbytes for parameter in filled.parameters())
    return sharers(optimizer.shard, optimizer.kind, weights, ranks)


COUNT = "step"  # a number of each parameter; all else has its shape
ADAMW = frozenset({COUNT, "exp_avg", "exp_avg_sq"})
SGD = frozenset({"momentum_buffer"})
KNOWN: dict[type[torch.optim.Optimizer], frozenset[str]] = {
    torch.optim.AdamW: ADAMW,
    torch.optim.Adam: ADAMW,
    torch.optim.SGD: SGD,
    EagerAdamW: ADAMW,
    EagerSGD: SGD,
}


def check_state(
    name: str,
    parameter: Tensor,
    state: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    source: str,
) -> None:
    """Refuse tensors that the optimizer does not keep, or that do not fit the parameter.

    Raises:
        TilenetError: The error names the first of them.
    """
    names = KNOWN.get(type(optimizer))
    if names is not None and any(group.get("amsgrad") for group in optimizer.param_groups):
        names |= {"max_exp_avg_sq"}
    # Of other optimizers neither names nor shapes are known.
    wrong = sorted((names or set(state)) ^ set(state)) or [
        key
        for key, value in sorted(state.items())
        if not value.is_floating_point()
        or (names and value.shape != parameter.shape and key != COUNT)
        or (key == COUNT and value.numel() != 1)
        or not value.double().isfinite().all()
    ]
    if wrong:
        raise TilenetError(
            f"an optimizer goes on with what it kept of each parameter, in finite numbers "
            f"({source}: {wrong[0]} of {name} is missing, unknown or of another shape); use "
            "another checkpoint"
        )


def optimizer_tensors(
    network: Network, optimizer: torch.optim.Optimizer, shares: Shares | None = None
) -> dict[str, Tensor]:
    """An optimizer's states, by the parameter's name and the state's name.

    Args:
        shares: Shares of the ranks in the states: they travel part by part to rank 0, which alone
            holds all, as copies; empty on the others. Collective then.
    """
    names: dict[torch.Tensor, str] = {
        parameter: name for name, parameter in network.named_parameters()
    }
    if shares is not None:
        return {
            f"{names[shares.parameters[number]]}.{key}": value
            for (number, key), value in _gather(optimizer, shares).items()
        }
    return {
        f"{names[parameter]}.{key}": value
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def _gather(optimizer: torch.optim.Optimizer, shares: Shares) -> dict[tuple[int, str], Tensor]:
    """States by number of the parameter and name of the state, whole, on rank 0. Collective."""
    comm, tensors = shares.comm, dict[tuple[int, str], Tensor]()
    states = [optimizer.state[own] for own in shares.own]
    own_keys = {
        (part.parameter, key)
        for part, state in zip(shares.parts(comm.rank), states, strict=False)
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    # Of a parameter that was not updated yet there are none.
    keys = dict[int, list[str]]()
    for number, key in sorted(set().union(*comm.allgather(own_keys))):
        keys.setdefault(number, []).append(key)
        if comm.rank == 0:
            tensors[number, key] = _make_like(shares.parameters[number], key)
    for rank in range(comm.size):
        for index, part in enumerate(shares.parts(rank)):
            for key in keys.get(part.parameter, []):
                own_value = states[index][key].cpu() if rank == comm.rank else None
                if comm.rank > 0 and own_value is not None:
                    comm.Send(own_value.numpy(), dest=0)
                elif comm.rank == 0:
                    into = _of_part(tensors[part.parameter, key], key, part)
                    if own_value is None:
                        comm.Recv(into.numpy(), source=rank)
                    else:
                        into.copy_(own_value)
    return tensors


def _make_like(parameter: Tensor, key: str) -> Tensor:
    if key == COUNT:
        return torch.zeros((), dtype=torch.float32)
    return torch.empty_like(parameter, device="cpu", requires_grad=False)


def _of_part(value: Tensor, key: str, part: Part) -> Tensor:
    return value if key == COUNT else value.view(-1)[part.start : part.stop]


def fill_optimizer(
    network: Network,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Tensor],
    where: str,
    shares: Shares | None = None,
) -> None:
    """Load states of `optimizer_tensors` into an optimizer.

    Args:
        state: Whole states, which are copied.
        where: Name of the checkpoint, for errors.
        shares: Shares of the ranks in the states; None: each rank keeps all.

    Raises:
        TilenetError: The states are of another network or optimizer.
    """
    for name, parameter in network.named_parameters():
        own_state = {
            key.removeprefix(f"{name}."): value
            for key, value in state.items()
            if key.startswith(f"{name}.")
        }
        if own_state:
            check_state(name, parameter, own_state, optimizer, where)
            # Unless it is fused, AdamW counts its steps on the host, for a GPU too.
            on_host = set() if optimizer.defaults.get("fused") else {COUNT}
            whole = {key for key, value in own_state.items() if value.shape != parameter.shape}
            whole.add(COUNT)
            for part, own in _own_parts(parameter, shares):
                optimizer.state[own] = {
                    key: (value if key in whole else _of_part(value, key, part))
                    .to("cpu" if key in on_host else parameter.device, copy=True)
                    .view(value.shape if key in whole else own.shape)
                    for key, value in own_state.items()
                }


def _own_parts(parameter: nn.Parameter, shares: Shares | None) -> list[tuple[Part, nn.Parameter]]:
    if shares is None:
        return [(Part(0, 0, parameter.numel()), parameter)]
    return shares.own_of.get(parameter, [])
