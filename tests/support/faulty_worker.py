"""Faults of ranks: what `detection/sitecustomize.py` makes of a rank's `Worker`, in processes that have its folder on PYTHONPATH.

Inert unless CP_TEST_FAULTS names a folder (docs/testing.md). A file `<rank>.json` there, `{"kind": "oom", "at": "module", "module":
3}`, is removed by that rank and takes effect at that place: `memory`, before it maps any; `start`, before it joins the others;
`load`, before it loads a model; `call`, before a call; `weights`, when it has brought that many pieces of a model to its device
(`module` counts them); `module`, when it enters that planned module of a call; `compile`, when it begins to compile. With `"times":
2` it stays for a second time; with `"then"` another fault follows it. `slow` sleeps for `seconds` there, and at every later module.
"""

import ctypes
import errno
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

FOLDER = "CP_TEST_FAULTS"  # environment variable


def _raise(error: BaseException) -> NoReturn:
    raise error


def _evict() -> None:
    """Have this rank's ComfyUI take all models from its device, as it does when another process needs the memory."""
    from comfy import model_management

    model_management.unload_all_models()


def _spin() -> NoReturn:
    while True:
        pass


def _hold_lock() -> None:
    """Stay in C, holding the GIL. Unlike a sleep, the signal that asks for stacks does not end it."""
    if sys.platform == "win32":
        ctypes.PyDLL("kernel32").Sleep(3_600_000)
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # zeros: a mutex that its own thread can wait for
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _access_nothing() -> None:
    if sys.platform == "win32":  # in a thread of the system's: ctypes makes an exception of it
        ctypes.WinDLL("kernel32").CreateThread(None, 0, ctypes.c_void_p(16), None, 0, None)
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGSEGV)


def _leave_a_child() -> None:
    """Be killed beside a process that has all of this one's descriptors, as one of `multiprocessing` does."""
    this = os.getpid()
    if os.fork() == 0:
        from cp_runtime.system import system

        system.name_process("child")  # no rank
        while os.getppid() == this:
            time.sleep(0.05)
        time.sleep(4)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _see_no_memory() -> None:
    """Have the system refuse memory of other processes, as some containers do."""
    from cp_runtime.system import system

    def refuse(*_: int) -> NoReturn:
        raise PermissionError(errno.EACCES, "injected: no memory of other processes")

    system.foreign_fd = refuse  # type: ignore[assignment]


def _device_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def _device_assert() -> None:
    """An index out of range, which a kernel notices: no call on this device works any more."""
    torch.zeros(1, device="cuda")[torch.full((1,), 5, device="cuda")].cpu()


def _device_hang() -> None:
    """Kernels for minutes. The host waits as soon as the device's queue is full."""
    x = torch.ones(8192, 8192, dtype=torch.float64, device="cuda")
    for _ in range(100_000):
        torch.mm(x, x)
    torch.cuda.synchronize()


KINDS: dict[str, Callable[[], Any]] = {
    # caught, and reported by the rank
    "oom": lambda: _raise(torch.OutOfMemoryError("injected: CUDA out of memory. Tried to allocate 20.00 GiB.")),
    "error": lambda: _raise(RuntimeError("injected: error")),
    "evict": _evict,
    # ends the process
    "uncaught": lambda: _raise(BaseException("injected: uncaught")),
    "sysexit": lambda: sys.exit(0),
    "exit": lambda: os._exit(1),
    "segv": _access_nothing,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leave a child": _leave_a_child,
    # all the time
    "sees no memory": _see_no_memory,
    # hangs
    "sleep": lambda: time.sleep(3600),
    "spin": _spin,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "lock": _hold_lock,
    # on a GPU
    "device memory": _device_memory,
    "device assert": _device_assert,
    "device hang": _device_hang,
}


def armed_fault(rank: int, place: str) -> Callable[[int], None] | None:
    """Take the fault that waits for `rank` at `place`, if there is one: a function of the module number.

    Kind `slow` sleeps for `seconds` at the module that it names and every later one.
    """
    folder = os.environ.get(FOLDER, "")
    if not folder:
        return None
    path = Path(folder) / f"{rank}.json"
    if not path.exists():
        return None
    fault = json.loads(path.read_text())
    if fault.get("at", "module") != place:
        return None
    left = fault.get("times", 1) - 1
    following = {**fault, "times": left} if left > 0 else fault.get("then")
    if following:
        path.write_text(json.dumps(following))
    else:
        path.unlink()

    def strike(module: int) -> None:
        if fault["kind"] == "slow":
            time.sleep(fault["seconds"] if module >= fault.get("module", 0) else 0)
        elif module == fault.get("module", 0):
            KINDS[fault["kind"]]()

    return strike


def inject(rank: int, place: str) -> None:
    """Let the fault happen that waits for `rank` at a place other than a module."""
    fault = armed_fault(rank, place)
    if fault is not None:
        fault(0)


def make_faulty(module: Any) -> None:
    """Have the ranks of `cp_runtime.pool.worker` look for faults."""

    class FaultyWorker(module.Worker):
        """A rank that looks for faults."""

        def __init__(self, spec: dict[str, Any], inbox: Any) -> None:
            inject(spec["rank"], "memory")
            super().__init__(spec, inbox)

        def _connect(self, *command: Any) -> Any:
            inject(self.rank, "start")
            return super()._connect(*command)

        def keep(self, *given: Any) -> torch.Tensor:
            kept: torch.Tensor = super().keep(*given)
            inject(self.rank, "load")
            return kept

        def module_hook(self, cancel_every: int) -> Callable[[], None]:
            inject(self.rank, "call")
            enter, fault = super().module_hook(cancel_every), armed_fault(self.rank, "module")
            entered = itertools.count(1)

            def on_module() -> None:
                enter()
                if fault is not None:
                    fault(next(entered))

            return on_module

        def compiling(self, part: int) -> None:
            super().compiling(part)
            if part:
                inject(self.rank, "compile")

        def loading_hook(self) -> Callable[[int | None], None]:
            tell, told = super().loading_hook(), itertools.count(1)
            fault: Callable[[int], None] | None = None

            def on_loaded(loaded: int | None) -> None:
                nonlocal fault, told
                if loaded == 0:
                    fault, told = armed_fault(self.rank, "weights"), itertools.count(1)
                tell(loaded)
                if fault is not None and loaded is not None:
                    fault(next(told))

            return on_loaded

    module.Worker = FaultyWorker
