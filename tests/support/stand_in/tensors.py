"""Tensors that are on a card by their own account, with their numbers on the CPU.

Every operation of torch comes by here: its operands' numbers go through the CPU's kernel, and the result is on the card again.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import linecache
import math
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import groups, kernels, memory, pinned, races

aten = torch.ops.aten
CPU = torch.device("cpu")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))) + os.sep

TO_OTHER = {aten.to.other, aten.type_as.default}
COPIES = {aten.copy_.default, aten._to_copy.default, aten.to.device, aten.to.dtype, aten.to.dtype_layout, *TO_OTHER}
INDEXED = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default, aten._unsafe_index.Tensor,
}  # fmt: skip
WAITED = {
    aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, aten.nonzero.default, aten.masked_select.default,
    aten.equal.default, aten.unique_dim.default, aten._unique2.default, aten.unique_consecutive.default, aten.bincount.default,
    aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor,
}  # fmt: skip
ASSERTS = {
    *INDEXED, aten._assert_async.default, aten.index_select.default, aten.gather.default, aten.scatter.src, aten.embedding.default,
}  # fmt: skip
"""Whose kernels look at numbers, and fail the card where those are wrong."""
EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.zeros.default, aten.ones.default, aten.full.default}

waits: Counter[str] = Counter()
"""What made the host wait for a card, and where: `item, folder/file.py: the line`."""
_local = threading.local()
_raises = False
_stock_is_pinned: Any = Tensor.is_pinned


def set_sync_debug_mode(mode: str | int) -> None:
    """See torch's."""
    global _raises
    _raises = mode in ("error", 2)


class _Kind(type(Tensor)):  # type: ignore[misc]
    """Is the class of the same tensor on the CPU to who compares types."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.on_cpu

    def __hash__(cls) -> int:
        return hash(cls.on_cpu)


class OnCard(Tensor, metaclass=_Kind):
    """A tensor on a card.

    Attributes:
        numbers: of it, on the CPU.
        taken: bytes of their memory.
        on_cpu: class of the same tensor there.
    """

    numbers: Tensor
    taken: int
    on_cpu: type[Tensor] = Tensor
    _hold: memory.Hold
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, card: int) -> OnCard:
        tensor: OnCard = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=torch.device(memory.LEDGER.type, card),
        )  # fmt: skip
        tensor._hold = memory.Hold(inner, card)
        tensor.numbers, tensor.taken = inner, inner.untyped_storage().nbytes()
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if _foreign(types):
            return NotImplemented
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.numbers!r} on {self.device}"

    def __deepcopy__(self, memo: Any) -> Any:
        copy = OnCard(self.numbers.clone(), self.device.index)
        return torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.numbers.untyped_storage()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        if self._hold.held is not None:
            self._hold.held.recorded.add(stream.cuda_stream)


@functools.cache
def _class_on_card(cls: type[Tensor]) -> type[OnCard]:
    """The class of tensors on a card that wear `cls`, one without operators of its own. Their operations come by `Everywhere`."""
    names = {"on_cpu": cls, "__torch_dispatch__": Tensor.__torch_dispatch__}
    names["__torch_function__"] = inspect.getattr_static(cls, "__torch_function__")
    made: type[OnCard] = _Kind(cls.__name__, (cls, OnCard), {**names, "__module__": cls.__module__})
    return made


def _worn(tensor: Tensor, cls: type[Tensor], stock: Callable[..., Tensor]) -> Tensor:
    """A tensor under another class, by torch's function for it."""
    cls = cls.on_cpu if issubclass(cls, OnCard) else cls
    if not isinstance(tensor, OnCard) or not (cls is Tensor or _is_dressed(cls)):
        return stock(tensor, cls)
    made = OnCard(tensor.numbers, tensor.device.index)
    if cls is not Tensor:
        made.__class__ = _class_on_card(cls)
    return made


def _is_dressed(cls: type[Tensor]) -> bool:
    """Whether it is one of tensors with attributes of their own, and no operators."""
    return not _foreign([cls]) and getattr(cls, "on_cpu", cls) not in (Tensor, torch.nn.Parameter)


class Everywhere(TorchDispatchMode):
    """Brings operations here that make a tensor on a card from nothing or from the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _foreign(types):
            return NotImplemented
        return _run(func, args, kwargs or {})


def install() -> None:
    """From now on, in every thread of this process."""
    torch._C._ensureCUDADeviceGuardSet()
    kind = memory.LEDGER.type
    if kind == "xpu":
        _ensure_guard()
    data: Any = Tensor.data

    def pin_memory(self: Tensor, *_: Any) -> Tensor:
        if isinstance(self, OnCard):
            raise RuntimeError(f"cannot pin a tensor on {self.device}: only dense CPU tensors can be pinned")
        return self if _is_pinned(self) else pinned.pinned(self)

    def put_data(self: Tensor, value: Tensor) -> None:
        if isinstance(self, OnCard) or isinstance(value, OnCard):
            if _is_dressed(type(self)):
                new = value.as_subclass(type(self))
                vars(new).update({name: of for name, of in vars(self).items() if name not in ("numbers", "taken", "_hold")})
            else:
                new = torch.nn.Parameter(value, self.requires_grad) if isinstance(self, torch.nn.Parameter) else value.detach()
            torch.utils.swap_tensors(self, new)
        else:
            data.__set__(self, value)

    to: Any = Tensor.to

    def with_number(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(self, *map(_numbered, args), **{name: _numbered(value) for name, value in kwargs.items()})

    of_numbers: Any = torch.tensor

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        return of_numbers(data, device=_numbered(device), **kwargs)

    as_subclass: Any = Tensor.as_subclass
    make_subclass: Any = Tensor._make_subclass

    def make(cls: type[Tensor], data: Tensor, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        return _worn(data, cls, lambda data, cls: make_subclass(cls, data, requires_grad, **kwargs))

    changed: Any = Tensor
    changed.as_subclass = lambda self, cls: _worn(self, cls, as_subclass)
    changed._make_subclass = staticmethod(make)
    changed.to = with_number
    vars(torch)["tensor"] = tensor
    changed.pin_memory = pin_memory
    changed.is_pinned = lambda self, *_: _is_pinned(self)
    setattr(changed, kind, lambda self, device=None, non_blocking=False, **_: self.to(device or kind, non_blocking=non_blocking))
    changed.data = property(data.__get__, put_data)
    run_thread: Any = threading.Thread.run

    def run(self: threading.Thread) -> None:
        _in_thread()
        with Everywhere():
            run_thread(self)

    threading.Thread.run = run  # type: ignore[method-assign]
    _in_thread()
    kernels.whole_attention(kind)
    Everywhere().__enter__()


def _ensure_guard() -> None:
    """Do what torch has functions for with CUDA and PrivateUse1: its C++ code changes the current device, and has no way to."""
    of: Any = torch._C._autograd.DeviceType
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[int(of.XPU)] = guards[int(of.Meta)]  # which does nothing


def _numbered(device: Any) -> Any:
    """A card by its number, which torch would ask the driver for."""
    named = isinstance(device, str | torch.device) and str(device) == memory.LEDGER.type
    return torch.device(memory.LEDGER.type, memory.LEDGER.module.current_device()) if named else device


def _is_pinned(tensor: Tensor) -> bool:
    if _foreign([type(tensor)]):
        return _stock_is_pinned(tensor)
    return tensor.device.type == "cpu" and pinned.is_pinned(tensor)


def _in_thread() -> None:
    torch._C._set_only_lift_cpu_tensors(True)  # a list of numbers becomes a tensor of the CPU first, and is then copied


def _foreign(types: Any) -> bool:
    """Whether a tensor is of a kind with operations of its own: a quantised weight, whose parts are on the card."""
    return any(kind is not OnCard and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    leaves = list(races.flat((args, kwargs)))
    theirs = [leaf for leaf in leaves if isinstance(leaf, OnCard)]
    if func.namespace == "c10d":
        out = groups.run(func, args, kwargs, leaves)
        if out is not None:
            return out
    device = _asked_for(func, args, kwargs)
    if not theirs and (device is None or device.type != memory.LEDGER.type):
        if kwargs.get("pin_memory"):
            return pinned.pinned(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)
    if theirs and torch.is_inference_mode_enabled() and not all(tensor.is_inference() for tensor in theirs):
        with torch.inference_mode(False), torch.no_grad():  # a view of a tensor from before is none of inference mode
            return _on_card(func, args, kwargs, leaves, theirs, device)
    return _on_card(func, args, kwargs, leaves, theirs, device)


def _on_card(func: Any, args: Any, kwargs: Any, leaves: list[Tensor], theirs: list[OnCard], device: torch.device | None) -> Any:
    if func is aten._has_compatible_shallow_copy_type.default:
        return True  # see `put_data`
    card = theirs[0].device.index if theirs else 0
    kind, current_stream = memory.LEDGER.type, memory.LEDGER.module.current_stream
    if device is not None and device.type == kind:
        card = memory.LEDGER.module.current_device() if device.index is None else device.index
        if card >= len(kernels.kinds):
            raise RuntimeError(f"{kind.upper()} error: invalid device ordinal: {card} of {len(kernels.kinds)}")
    to_card = bool(theirs) if device is None else device.type == kind
    _local.waited = False
    if func in COPIES:
        to_card = _copied(func, args, kwargs, to_card)
    elif func.namespace in ("aten", "prims"):
        _check_devices(func, args, leaves, theirs)
    if func in EMPTY and to_card:
        memory.LEDGER.fits(card, math.prod(args[0]) * (kwargs.get("dtype") or torch.get_default_dtype()).itemsize)

    owners: list[tuple[Tensor, OnCard]] = []

    def on_host(value: Any) -> Any:
        if isinstance(value, OnCard):
            owners.append((value.numbers, value))
            return value.numbers
        if isinstance(value, Tensor) and type(value) is not Tensor:
            return value.as_subclass(Tensor)
        return CPU if isinstance(value, torch.device) and value.type == kind else value

    cpu_args, cpu_kwargs = _mapped(args, on_host), _mapped(kwargs, on_host)
    cpu_kwargs.pop("pin_memory", None)
    for each in {card} if to_card else {tensor.device.index for tensor in theirs}:
        memory.LEDGER.touch(each)
    if code := pinned.last_error():
        raise memory.AcceleratorError(f"{kind.upper()} error: {code}")
    kernels.check(func, card, leaves)
    try:
        with torch._C._DisableTorchDispatch():
            out = kernels.KERNELS.get(func, func)(*cpu_args, **cpu_kwargs)
    except (IndexError, RuntimeError) as error:
        if func in ASSERTS and any(words in str(error) for words in ("out of bounds", "out of range", "single nonzero value")):
            memory.LEDGER.failed.add(card)
            raise memory.AcceleratorError(f"{kind.upper()} error: device-side assert triggered") from error
        raise

    for inner, owner in owners:
        if (inner.size(), inner.stride(), inner.untyped_storage().nbytes()) != (owner.size(), owner.stride(), owner.taken):
            raise NotImplementedError(f"{func} changes the form of a tensor in place")

    def result(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        owner = next((tensor for inner, tensor in owners if inner is value), None)
        if not to_card:
            return value.clone() if owner is not None else value
        if owner is not None and owner.device.index == card:
            return owner
        between = func in COPIES and func is not aten.copy_.default
        if between and any(_same_memory(value, leaf) for leaf in leaves if leaf.device != torch.device(kind, card)):
            value = value.clone()
        return OnCard(value, card)

    results = _mapped(out, result)
    made = [tensor for tensor in races.flat(results) if isinstance(tensor, OnCard)]
    if (
        kind == "xpu"
        and any(tensor.dtype == torch.float64 for tensor in made)
        and not all(t.dtype == torch.float64 for t in theirs)
    ):
        raise RuntimeError("Required aspect fp64 is not supported on the device")  # of Arc
    cards = dict.fromkeys(tensor.device.index for tensor in (*theirs, *made))
    if streams := [current_stream(each).cuda_stream for each in cards]:
        races.kernel(func, args, kwargs, [tensor.numbers for tensor in made], streams)
        if _local.waited:
            races.told("stream_synchronization", streams[0])
    return results


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Arguments or results, with everything in them replaced."""
    if isinstance(value, dict):
        return {name: _mapped(item, function) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, function) for item in value)
    return function(value)


def _asked_for(func: Any, args: Any, kwargs: Any) -> torch.device | None:
    """The device that an operation was given."""
    if func in TO_OTHER:
        other: torch.device = args[1].device
        return other
    device = kwargs.get("device")
    return device if device is not None else next((arg for arg in args if isinstance(arg, torch.device)), None)


def _copied(func: Any, args: Any, kwargs: Any, to_card: bool) -> bool:
    """Note that a copy makes the host wait; return whether its result is on a card."""
    into = func is aten.copy_.default
    source = args[1] if into else args[0]
    target = isinstance(args[0], OnCard) if into else to_card
    non_blocking = kwargs.get("non_blocking", args[2] if into and len(args) > 2 else False)
    from_card = isinstance(source, OnCard)
    # The side that is on the host must be pinned; what torch makes there itself is.
    on_host = source if not from_card else args[0] if into else None
    beside = non_blocking and (on_host is None or _is_pinned(on_host))
    if from_card != target and source.numel() and not beside:
        _wait("copy from the card" if from_card else "copy to the card")
    return target


def _check_devices(func: Any, args: Any, leaves: list[Tensor], theirs: list[OnCard]) -> None:
    """Raise as a card does where operands are on two devices; note what makes the host wait for a result."""
    if func not in INDEXED and func not in WAITED and len({leaf.device for leaf in leaves}) == 1:
        return
    indices: list[Any] = list(races.flat(args[1])) if func in INDEXED else []
    if theirs and (func in WAITED or any(index.dtype in (torch.bool, torch.uint8) for index in indices)):
        _wait(func.overloadpacket.__name__)
    if any(index.ndim and not isinstance(index, OnCard) for index in indices):
        _wait("index from the CPU")
    # Numbers of the CPU go along as arguments of a kernel, and its indices are copied to a card.
    free = [leaf for leaf in leaves if not isinstance(leaf, OnCard) and (not leaf.ndim or any(leaf is index for index in indices))]
    if indices and not isinstance(args[0], OnCard):
        free = []
    bound = (leaf.device for leaf in leaves if not any(leaf is one for one in free))
    found = {str(device) for device in bound if device.type in (memory.LEDGER.type, "cpu")}
    if free and func.overloadpacket.__name__.endswith("_") and args[0] is free[0]:
        found.add("cpu")  # what is written lies there
    if theirs and len(found) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {', '.join(sorted(found))}: {func}"
        )


def _same_memory(a: Tensor, b: Tensor) -> bool:
    inner = b.numbers if isinstance(b, OnCard) else b
    return type(a) is Tensor and a.untyped_storage()._cdata == inner.untyped_storage()._cdata


def _wait(what: str) -> None:
    """Note that the host waits, which an operation does when it has been given to the card."""
    _local.waited = True
    if _raises:
        raise RuntimeError(f"called a synchronizing {memory.LEDGER.type.upper()} operation: {what}")
    place = next(races.callers(), None)
    if place is not None:
        name, line = place.f_code.co_filename, place.f_lineno
        waits[f"{what}, {name.removeprefix(ROOT)}: {linecache.getline(name, line).strip()}"] += 1
