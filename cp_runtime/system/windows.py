"""Windows. See `posix` for what each of these names does; comments here say why it is done otherwise."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import msvcrt
import os
import secrets
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import wintypes
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from .environment import library_setting, whole_environment
from .interfaces import interface_of
from .programs import Program, start_program

HAS_DEVICE_BACKENDS = False
BROKEN_GLOO = ((2, 8), (2, 9), (2, 10))  # "unsupported gloo device": https://github.com/pytorch/pytorch/issues/150381
OPEN_NONBLOCKING = os.O_RDONLY
PRIVATE: dict[str, int] = {}
NONE: Mapping[str, Any] = {}
KILL = 9  # `os.kill` ends a process with this status
_PROCESS_DUP_HANDLE, _SYNCHRONIZE, _SAME_ACCESS = 0x40, 0x100000, 2
_KILL_ON_JOB_CLOSE, _EXTENDED_LIMITS = 0x2000, 9
_WAIT_TIMEOUT = 258
_ENVIRONMENT = whole_environment()
_STORE = "context-parallel-store-"
_MAX_COUNT = 0x7FFFFFFF  # count of a semaphore
_kernel = ctypes.WinDLL("kernel32", use_last_error=True)  # gives up the GIL meanwhile


def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a function of the system that raises OSError if it returns 0."""
    found: Any = getattr(_kernel, name)
    found.restype, found.argtypes = result, arguments

    def call(*given: Any) -> Any:
        if not (value := found(*given)):
            raise ctypes.WinError(ctypes.get_last_error())
        return value

    return call


_HANDLE, _DWORD, _BOOL = wintypes.HANDLE, wintypes.DWORD, wintypes.BOOL
_create_job = _function("CreateJobObjectW", _HANDLE, ctypes.c_void_p, wintypes.LPCWSTR)
_set_job = _function("SetInformationJobObject", _BOOL, _HANDLE, ctypes.c_int, ctypes.c_void_p, _DWORD)
_add_to_job = _function("AssignProcessToJobObject", _BOOL, _HANDLE, _HANDLE)
_open_process = _function("OpenProcess", _HANDLE, _DWORD, _BOOL, _DWORD)
_duplicate = _function(
    "DuplicateHandle", _BOOL, _HANDLE, _HANDLE, _HANDLE, ctypes.POINTER(_HANDLE), _DWORD, _BOOL, _DWORD
)  # fmt: skip
_terminate = _function("TerminateProcess", _BOOL, _HANDLE, wintypes.UINT)
_close = _function("CloseHandle", _BOOL, _HANDLE)
_path = _function("GetFinalPathNameByHandleW", _DWORD, _HANDLE, wintypes.LPWSTR, _DWORD, _DWORD)
_short_path = _function("GetShortPathNameW", _DWORD, wintypes.LPCWSTR, wintypes.LPWSTR, _DWORD)
_create_semaphore = _function("CreateSemaphoreW", _HANDLE, ctypes.c_void_p, wintypes.LONG, wintypes.LONG, wintypes.LPCWSTR)
_release = _function("ReleaseSemaphore", _BOOL, _HANDLE, wintypes.LONG, ctypes.c_void_p)
_wait: Any = _kernel.WaitForSingleObject
_wait.restype, _wait.argtypes = _DWORD, (_HANDLE, _DWORD)
_THIS_PROCESS = _HANDLE(-1)


@contextmanager
def _process(pid: int, access: int) -> Iterator[Any]:
    handle = _open_process(access, False, pid)
    try:
        yield handle
    finally:
        _close(handle)


def _foreign(pid: int, handle: int) -> int:
    """Return a handle of this process for one of another process."""
    own = _HANDLE()
    with _process(pid, _PROCESS_DUP_HANDLE) as process:
        _duplicate(process, handle, _THIS_PROCESS, ctypes.byref(own), 0, False, _SAME_ACCESS)
    return own.value or 0


# Memory


_MAX_WRITE = 1 << 28  # bytes of a write


def memory_fd(name: str = "context-parallel") -> int:
    """Make a file that goes with its last handle, and that the system keeps in memory while there is room."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_BINARY | os.O_NOINHERIT | os.O_TEMPORARY | os.O_SHORT_LIVED
    return os.open(os.path.join(tempfile.gettempdir(), f"{name}-{secrets.token_hex(16)}"), flags, 0o600)


def reserve(fd: int, size: int, start: int = 0) -> None:
    if os.fstat(fd).st_size < size:
        os.ftruncate(fd, size)


def write_at(fd: int, data: memoryview, start: int) -> None:
    os.lseek(fd, start, os.SEEK_SET)
    while data:
        data = data[os.write(fd, data[:_MAX_WRITE]) :]


def shrink(fd: int, size: int) -> None:
    """Do nothing: a mapped file cannot shrink here."""


def number_of(fd: int) -> int:
    return msvcrt.get_osfhandle(fd)


def foreign_fd(pid: int, number: int, *, writable: bool = True) -> int:
    return msvcrt.open_osfhandle(_foreign(pid, number), os.O_RDWR | os.O_BINARY)


def path_of(fd: int) -> str:
    """While it is open here, no other file can get its name."""
    buffer = ctypes.create_unicode_buffer(1 << 15)
    _path(msvcrt.get_osfhandle(fd), buffer, len(buffer), 0)
    path = buffer.value.removeprefix("\\\\?\\")
    return "\\\\" + path.removeprefix("UNC\\") if path.startswith("UNC\\") else path


def store_path(fd: int) -> str:
    """Return a path of ASCII: torch takes no other. Raises OSError: there is none."""
    path = path_of(fd)
    if not path.isascii():
        buffer = ctypes.create_unicode_buffer(1 << 15)
        _short_path(path, buffer, len(buffer))
        path = buffer.value
    if not path.isascii():
        raise OSError(f"torch cannot open {path}: set TEMP to a folder whose path has letters of ASCII only, and restart ComfyUI")
    return path


def private_pages(fd: int) -> mmap.mmap:
    return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)


def file_pages(fd: int) -> mmap.mmap:
    """Map a file for reading only: what may be written counts against the memory of all processes, once per rank."""
    warnings.filterwarnings("ignore", "The given buffer is not writable")  # of torch.frombuffer
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)


@contextmanager
def store_file() -> Iterator[int]:
    """With a name: torch opens it by that, and does not share it with one who may delete it."""
    for left in Path(tempfile.gettempdir()).glob(f"{_STORE}*"):  # by one that was ended; those in use cannot be removed
        with contextlib.suppress(OSError):
            left.unlink()
    fd, path = tempfile.mkstemp(prefix=_STORE)
    try:
        yield fd
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):  # torch may have removed it, or a rank that ends still has it open
            os.unlink(path)


def mapped_files() -> list[tuple[int, int, str]]:
    """Return nothing: the system does not say."""
    return []


def file_ranges(path: str) -> list[tuple[int, int, int]]:
    return []


def is_written(begin: int, end: int) -> bool:
    return True


def release_pages(begin: int, end: int) -> None: ...


def trim_heap() -> None: ...


# Processes


class _Limits(ctypes.Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

    _fields_ = [
        ("times", ctypes.c_int64 * 2), ("flags", _DWORD), ("sets", ctypes.c_size_t * 2), ("active", _DWORD),
        ("affinity", ctypes.c_size_t), ("priority", _DWORD), ("scheduling", _DWORD), ("io", ctypes.c_uint64 * 6),
        ("memory", ctypes.c_size_t * 4),
    ]  # fmt: skip


@cache
def _job() -> Any:
    """Return a job whose processes the system ends with this one, which holds its only handle."""
    job, limits = _create_job(None, None), _Limits(flags=_KILL_ON_JOB_CLOSE)
    _set_job(job, _EXTENDED_LIMITS, ctypes.byref(limits), ctypes.sizeof(limits))
    return job


def _handle_of(process: Any) -> int:
    """Return the handle of a `Popen`."""
    return int(process._handle)


def start(command: list[str], environment: Mapping[str, str], commands: int, reports: int, errors: int) -> Program:
    python, *arguments = command
    base = sys._base_executable  # type: ignore[attr-defined]
    if base != python:  # that of a venv starts another process, as `multiprocessing` knows
        environment = {**environment, "__PYVENV_LAUNCHER__": python}
    process = start_program([base, *arguments], environment, commands, reports, errors)
    _add_to_job(_job(), _handle_of(process))  # if this process ends before, the program finds its input at its end
    return process


def wait_for(process: Program) -> None:
    process.wait()


def die_with_parent(parent: int) -> None:
    """Do nothing: the parent's job does."""


def send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):  # one that is ending refuses a second time
        os.kill(pid, number)


def exit_now(code: int) -> NoReturn:
    """`os._exit` has every DLL clean up here, which may hang."""
    _terminate(_THIS_PROCESS, code)
    os._exit(code)


def name_process(name: str) -> None: ...


def allow_open_files() -> None: ...


# https://learn.microsoft.com/openspecs/windows_protocols/ms-erref: NTSTATUS values
_EXITS = {
    0xC0000005: "STATUS_ACCESS_VIOLATION",
    0xC0000017: "STATUS_NO_MEMORY",
    0xC000001D: "STATUS_ILLEGAL_INSTRUCTION",
    0xC00000FD: "STATUS_STACK_OVERFLOW",
    0xC0000135: "STATUS_DLL_NOT_FOUND",
    0xC000013A: "STATUS_CONTROL_C_EXIT",
    0xC0000142: "STATUS_DLL_INIT_FAILED",
    0xC0000374: "STATUS_HEAP_CORRUPTION",
    0xC0000409: "STATUS_STACK_BUFFER_OVERRUN",  # of `abort`, too
}


def name_of_exit(code: int) -> str:
    return _EXITS.get(code & 0xFFFFFFFF, f"0x{code & 0xFFFFFFFF:08X}" if code & 0xC0000000 else "")


def cores() -> set[int]:
    return set(range(os.cpu_count() or 1))


def set_affinity(numbers: set[int]) -> None:
    raise OSError("nothing says which cores are near a device")


def user() -> int:
    """Return what `os.stat` has for every file."""
    return 0


def environment_at_start() -> dict[str, str]:
    """Return that of the moment in which ComfyUI imported this pack: the system knows the current one only."""
    return _ENVIRONMENT


# GPUs


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64)]


@cache
def hidden_gpus() -> list[tuple[str, int, tuple[int, int]]]:
    """ComfyUI hides all GPUs but one from itself, as copies fail once a process has opened several: its issue 15737."""
    try:
        nvml = ctypes.WinDLL("nvml.dll")  # of the driver
    except OSError:
        return []
    count, found = ctypes.c_uint(), []
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) or count.value < 2:
        return []
    for number in range(count.value):
        device, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _NvmlMemory()
        major, minor = ctypes.c_int(), ctypes.c_int()
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
        failed = failed or nvml.nvmlDeviceGetName(device, name, len(name))
        failed = failed or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        if failed or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
            return []
        found.append((name.value.decode(errors="replace"), memory.total, (major.value, minor.value)))
    return found


def visibility_env(device: str) -> tuple[str, dict[str, str]]:
    """Let a rank open one GPU: see `hidden_gpus`. Where the user names some (`CUDA_VISIBLE_DEVICES`), a number counts these."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return device, {}
    named = library_setting("CUDA_VISIBLE_DEVICES") or ""
    if named == "0" and hidden_gpus():
        return "cuda:0", {"CUDA_VISIBLE_DEVICES": number, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as NVML counts
    return "cuda:0", {"CUDA_VISIBLE_DEVICES": named.split(",")[int(number)].strip() if named else number}


def loopback() -> str:
    return interface_of("127.0.0.1", "Loopback Pseudo-Interface 1")


# Between ranks


def host_id() -> int:
    """Return a constant: other computers do not join here."""
    return 1


class Semaphores:
    """Semaphores of the kernel. What processes map holds the owner's handle."""

    def make(self, address: int) -> int:
        semaphore = _create_semaphore(None, 0, _MAX_COUNT, None)
        ctypes.c_int64.from_address(address).value = semaphore
        return int(semaphore)

    def open(self, address: int, owner: int) -> int:
        handle = ctypes.c_int64.from_address(address).value
        return handle if owner == os.getpid() else _foreign(owner, handle)

    def post(self, semaphore: int) -> None:
        _release(semaphore, 1, None)

    def try_take(self, semaphore: int) -> bool:
        return bool(_wait(semaphore, 0) == 0)

    def sleep(self, semaphore: int, seconds: float) -> bool:
        found = _wait(semaphore, int(seconds * 1e3))
        if found not in (0, _WAIT_TIMEOUT):
            raise ctypes.WinError(ctypes.get_last_error())
        return bool(found == 0)


def yield_core() -> None:
    time.sleep(0)


class Process:
    def __init__(self, pid: int) -> None:
        self._handle = _open_process(_SYNCHRONIZE, False, pid)

    @property
    def has_ended(self) -> bool:
        return bool(_wait(self._handle, 0) == 0)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            _close(self._handle)
