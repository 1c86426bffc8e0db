"""`torch.cuda`, `torch.xpu` or `torch.npu`, as far as this project, ComfyUI and torch itself ask it, for fake devices."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from typing import Any

import torch

from . import HIDDEN, LINK, Cards, Kind, groups, kernels, memory, pinned, races, tensors, wanted

ONLY_CUDA = {"get_arch_list", "cudart", "_sleep"}
"""What torch_npu does not have."""
_local = threading.local()


class Properties:
    """Of a card; what is not of its kind is of the Hopper generation."""

    multi_processor_count, warp_size = 132, 32
    L2_cache_size, gcnArchName, is_integrated, pci_bus_id, uuid = 50 << 20, "", 0, 0, "stand-in"
    has_fp16 = has_fp64 = True
    max_threads_per_multi_processor, regs_per_multiprocessor = 2048, 65536
    shared_memory_per_block_optin = shared_memory_per_multiprocessor = 227 << 10

    def __init__(self, card: int) -> None:
        kind = kernels.kinds[card]
        self.name, (self.major, self.minor) = kind.name, kind.capability
        self.total_memory = memory.LEDGER.capacities[card]


class Event:
    """When the program came by, because everything has been done by then; and what a stream had been given."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at, self._number = 0.0, races.new_number()

    def __del__(self) -> None:
        races.told("event_deletion", self._number)

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()
        races.told("event_record", self._number, (stream or current_stream()).cuda_stream)

    def wait(self, stream: Stream | None = None) -> None:
        races.told("event_wait", self._number, (stream or current_stream()).cuda_stream)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        memory.LEDGER.touch(current_device())
        tensors._wait("event")
        if threading.current_thread() is threading.main_thread():  # another one's program goes on meanwhile
            races.told("event_synchronization", self._number)

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


class Stream:
    """Has done what it was given."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device(memory.LEDGER.type, index(device))
        self.priority, self.cuda_stream = priority, races.new_number()

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        races.wait_stream(self.cuda_stream, stream.cuda_stream)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        memory.LEDGER.touch(self.device.index)
        tensors._wait("stream")
        races.told("stream_synchronization", self.cuda_stream)

    def __enter__(self) -> Stream:
        _entered().append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _entered().pop()


class Device(contextlib.ContextDecorator):
    """`with torch.cuda.device(1)`."""

    def __init__(self, device: Any) -> None:
        self.idx = index(device)

    def __enter__(self) -> None:
        self._before, _local.device = current_device(), self.idx

    def __exit__(self, *_: Any) -> None:
        _local.device = self._before


def index(device: Any = None) -> int:
    """The number of a card, however it is named."""
    if device is None:
        return current_device()
    found: int | None = device if isinstance(device, int) else torch.device(device).index
    if found is None:
        return current_device()
    if found >= len(kernels.kinds):
        raise RuntimeError(f"{memory.LEDGER.type.upper()} error: invalid device ordinal: {found} of {len(kernels.kinds)}")
    return found


def _hidden() -> list[Kind]:
    """Cards of the machine that this process does not see: torch was built for them, too."""
    cards = wanted(HIDDEN)
    return [] if cards is None else cards.each()


def current_device() -> int:
    """Of this thread."""
    return getattr(_local, "device", 0)


def set_device(device: Any) -> None:
    """For this thread; opens the card."""
    _local.device = index(device)
    memory.LEDGER.touch(_local.device)


def current_stream(device: Any = None) -> Stream:
    """Of this thread."""
    card = index(device)
    return next((stream for stream in reversed(_entered()) if stream.device.index == card), None) or default_stream(card)


@functools.cache
def default_stream(card: int | None = None) -> Stream:
    """That of a card."""
    return Stream(card)


def _entered() -> list[Stream]:
    """Streams of this thread's with statements."""
    if not hasattr(_local, "streams"):
        _local.streams = []
    streams: list[Stream] = _local.streams
    return streams


def _count() -> int:
    """How many there are. Where they are Intel's, who has asked must not fork processes that use them."""
    if memory.LEDGER.type == "xpu" and memory.LEDGER.opened is None:
        memory.LEDGER.opened = os.getpid()
    return len(kernels.kinds)


def _no_nccl() -> Any:
    raise RuntimeError("this torch was built without NCCL")


def _properties(device: Any = None) -> Properties:
    return Properties(index(device))


def _synchronize(device: Any = None) -> None:
    memory.LEDGER.touch(index(device))
    tensors._wait("synchronize")
    races.told("device_synchronization")


def _open() -> None:
    memory.LEDGER.touch(current_device())


def _memory(device: Any = None) -> tuple[int, int]:
    card = index(device)
    memory.LEDGER.touch(card)
    return memory.LEDGER.free(card), memory.LEDGER.capacities[card]


def _stats(device: Any = None) -> dict[str, int]:
    held, reserved = _allocated(device), memory.LEDGER.reserved(index(device))
    return {f"{kind}_bytes.all.current": held for kind in ("active", "allocated")} | {
        "reserved_bytes.all.current": reserved, "allocated_bytes.all.peak": _peak(device)
    }  # fmt: skip


def _allocated(device: Any = None) -> int:
    return memory.LEDGER.allocated(index(device))


def _peak(device: Any = None) -> int:
    memory.LEDGER.allocated(index(device))
    return memory.LEDGER.peak[index(device)]


def _reset_peak(device: Any = None) -> None:
    memory.LEDGER.peak[index(device)] = memory.LEDGER.allocated(index(device))


def install(cards: Cards) -> None:
    """Have torch's module for them, `torch.accelerator` and `torch.backends.cuda` answer for the cards."""
    kernels.kinds[:] = cards.each()
    answers = {
        "_lazy_init": _open,
        "is_available": lambda: _count() > 0,
        "is_initialized": lambda: memory.LEDGER.opened == os.getpid(),
        "_is_in_bad_fork": lambda: memory.LEDGER.opened not in (None, os.getpid()),
        "device_count": _count,
        "current_device": current_device,
        "set_device": set_device,
        "device": Device,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_properties": _properties,
        "get_device_capability": lambda device=None: kernels.kinds[index(device)].capability,
        "get_arch_list": lambda: sorted({"sm_{}{}".format(*kind.capability) for kind in (*kernels.kinds, *_hidden())}),
        "is_bf16_supported": lambda emulated=True: emulated or kernels.kinds[current_device()].capability >= (8, 0),
        "can_device_access_peer": lambda *_: os.environ.get(LINK) != groups.LATE,
        "synchronize": _synchronize,
        "set_sync_debug_mode": tensors.set_sync_debug_mode,
        "empty_cache": lambda: memory.LEDGER.empty_cache(),
        "ipc_collect": lambda: None,
        "mem_get_info": _memory,
        "memory_stats": _stats,
        "memory_summary": lambda *_, **__: "",
        "memory_allocated": _allocated,
        "memory_reserved": lambda device=None: memory.LEDGER.reserved(index(device)),
        "max_memory_allocated": _peak,
        "max_memory_reserved": _peak,
        "reset_peak_memory_stats": _reset_peak,
        "Event": Event,
        "Stream": Stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: default_stream(index(device)),
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "cudart": pinned.Runtime,
        "host_memory_stats": pinned.stats,
        "_sleep": lambda _: None,
        "manual_seed": lambda _: None,
        "manual_seed_all": lambda _: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_allocator_backend": lambda: "native",
        "is_current_stream_capturing": lambda: False,
    }
    module = memory.LEDGER.module
    for name, answer in answers.items():
        if (name not in ONLY_CUDA) if cards.type == "npu" else hasattr(module, name):
            setattr(module, name, answer)
        if hasattr(getattr(module, "memory", None), name):
            setattr(module.memory, name, answer)
    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: True
    accelerator.current_accelerator = lambda *_, **__: torch.device(cards.type)
    accelerator.device_count = lambda: len(kernels.kinds)
    accelerator.synchronize = _synchronize
    _change_generator()
    if cards.type != "cuda":
        torch.version.cuda = None  # ComfyUI asks it whether there is an NVIDIA GPU
        torch.cuda.nccl.version = _no_nccl
        return
    backend: Any = torch.backends.cuda
    backend.SDPAParams = kernels.Params
    backend.can_use_flash_attention = kernels.can_use_flash
    backend.can_use_cudnn_attention = kernels.can_use_cudnn
    backend.can_use_efficient_attention = kernels.can_use_efficient
    torch._C._host_emptyCache = pinned.empty_cache


def _change_generator() -> None:
    made: Any = torch.Generator

    class OfCpu(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, made)

    class Generator(metaclass=OfCpu):
        """Random numbers of a card are those of the CPU."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return made("cpu")

    torch.Generator = Generator  # type: ignore[misc]
