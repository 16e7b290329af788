"""A device next to the CPU, on a machine that has none: `second:0`.

It computes on the CPU, behind torch's interface for devices of others, and is as strict as a GPU:
an operator that gets tensors of both fails, `numpy()` fails, and backward runs in a thread of its
own. So runs on it find what was left on the wrong device, and a pipeline over `cpu` and `second:0`
has two devices that compute at the same time.

Each operator is done when it returns, so streams and events have nothing to wait for, and no memory
is pinned; `USED` counts how often they were asked for. Limits of memory are not imitated. A process
that has it keeps it: torch cannot unregister a device.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torchgpipe.stream
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

__all__ = ["PEAK_BYTES", "SECOND", "USED", "add_second_device"]

NAME = "second"
SECOND = torch.device("cpu")  # until it is there
USED: Counter[str] = Counter()
FREE_BYTES, PEAK_BYTES = 1 << 30, 12345

# They move values between devices, or take indices and scalars from the CPU, as GPUs do.
MIXED = {"copy_", "_to_copy", "_copy_from", "index", "index_put", "index_put_", "_index_put_impl_"}


class SecondTensor(Tensor):
    """A tensor on the second device, with one on the CPU that has its values."""

    stored: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "SecondTensor":
        tensor = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=SECOND,
        )
        tensor.stored = values
        return tensor

    def __init__(self, values: Tensor) -> None:
        pass

    def tolist(self) -> Any:
        """Values, which torch gives of its own tensors alone."""
        return self.stored.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator gives, computed by the CPU; its maps are on the device that torch says."""
    name = operator.overloadpacket.__name__
    device = kwargs.get("device")
    target = SECOND if device is None else torch.device(device)
    _refuse_mixed(name, args, kwargs)
    on_cpu, options = tree_map(_values, (args, dict(kwargs)))
    if device is not None:
        options["device"] = torch.device("cpu")
    if name == "_copy_from":
        on_cpu[1].copy_(on_cpu[0])
        return args[1]
    result = operator(*on_cpu, **options)
    if name == "copy_":
        return args[0]
    if name == "_to_copy" and result is on_cpu[0]:
        result = result.clone()
    written = _written(operator, args, kwargs, on_cpu, options)

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in written:
            return written[id(value)]
        return SecondTensor(value) if target.type == NAME else value

    return tree_map(wrap, result)


def _values(value: Any) -> Any:
    return value.stored if isinstance(value, SecondTensor) else value


def _refuse_mixed(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if name in MIXED:
        return
    tensors: list[Tensor] = []
    tree_map(lambda x: tensors.append(x) if isinstance(x, Tensor) else None, (args, dict(kwargs)))
    strays = [x for x in tensors if not isinstance(x, SecondTensor) and x.dim()]
    if strays:
        raise RuntimeError(
            f"expected all tensors to be on the same device ({name}: {strays[0].device} and "
            f"{SECOND})"
        )


def _written(
    operator: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    on_cpu: Sequence[Any],
    options: Mapping[str, Any],
) -> dict[int, Any]:
    """Arguments that the operator writes and returns, by the identity of their values."""
    written = {}
    for at, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if at < len(args):
                written[id(on_cpu[at])] = args[at]
            elif argument.name in kwargs:
                written[id(options[argument.name])] = kwargs[argument.name]
    return written


class _Event:
    """An end of work, which has come already."""

    def synchronize(self) -> None:
        """Wait for nothing."""
        USED["event"] += 1


class _Stream:
    """The device's streams; torchgpipe copies to the device of one, too."""

    def __init__(self, device: torch.device | None = None) -> None:
        assert device is None or device.type == NAME

    def record_event(self) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        USED["stream"] += 1


class _Module(backend_registration._DummyBackendModule):
    """`torch.second`, with what tilenet asks `torch.cuda` and `torch.xpu` for."""

    Stream = _Stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def current_stream(self, device: torch.device) -> _Stream:
        return _Stream(device)

    def stream(self, stream: _Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def set_device(self, device: torch.device) -> None:
        USED["set_device"] += 1

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        USED["mem_get_info"] += 1
        return FREE_BYTES, FREE_BYTES

    def memory_reserved(self, device: torch.device) -> int:
        return 0

    def memory_allocated(self, device: torch.device) -> int:
        return 0

    def max_memory_allocated(self, device: torch.device) -> int:
        return PEAK_BYTES

    def empty_cache(self) -> None:
        USED["empty_cache"] += 1

    def get_rng_state(self, device: int) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: int) -> None:
        """Its random numbers are the CPU's."""


def add_second_device() -> torch.device:
    """Register it with torch, and with torchgpipe, which knows streams of CUDA alone."""
    global SECOND
    if SECOND.type == NAME:
        return SECOND
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    SECOND = torch.device(NAME, 0)
    library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(  # type: ignore[no-untyped-call]
        lambda operator, *args, **kwargs: _compute(operator, args, kwargs), "PrivateUse1"
    )
    add_second_device.library = library  # type: ignore[attr-defined]  # it is undone with it
    _give_torchgpipe_its_stream()
    _pin_nothing()
    return SECOND


def _pin_nothing() -> None:
    """Count what would be pinned: the CPU's own memory serves this device."""
    empty = torch.empty

    def make(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        USED["pinned"] += pin_memory
        return empty(*args, **options)

    def pin(values: Tensor) -> Tensor:
        USED["pinned"] += 1
        return values

    torch.empty = make  # type: ignore[assignment]
    Tensor.pin_memory = pin  # type: ignore[assignment]
    Tensor.is_pinned = lambda values: False  # type: ignore[method-assign, assignment, misc]


def _give_torchgpipe_its_stream() -> None:
    stream = _Stream()
    plain = {
        name: getattr(torchgpipe.stream, name)
        for name in ("new_stream", "current_stream", "default_stream", "get_device", "is_cuda")
    }

    def of_device(function: Callable[[torch.device], Any]) -> Callable[[torch.device], Any]:
        return lambda device: stream if device.type == NAME else function(device)

    names = ("new_stream", "current_stream", "default_stream")
    changed: dict[str, Any] = {name: of_device(plain[name]) for name in names}
    changed["get_device"] = lambda s: SECOND if s is stream else plain["get_device"](s)
    changed["is_cuda"] = lambda s: s is not stream and plain["is_cuda"](s)
    import tilenet.parallel.pipeline.pipe  # noqa: F401  # whatever takes these names by then

    for module in list(sys.modules.values()):
        for name, function in plain.items():
            if getattr(module, "__dict__", {}).get(name) is function:
                setattr(module, name, changed[name])
