"""Linux. It imports on other systems, too, which have no ranks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from .environment import whole_environment
from .native import address_of
from .programs import Program, start_program

KILL = signal.SIGKILL
HAS_DEVICE_BACKENDS = True
"""Whether torch has libraries for messages between devices, such as NCCL."""
BROKEN_GLOO: tuple[tuple[int, int], ...] = ()
"""Versions of torch whose gloo connects no ranks."""
OPEN_NONBLOCKING = os.O_RDONLY | os.O_NONBLOCK
"""For `os.open`: no waiting where a name turns out to be a pipe's."""
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
"""For `mmap.mmap`: memory of this process alone."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
# MAP_NORESERVE of Linux, which `mmap` names from Python 3.13 on. Without it a private map of a model counts against the commit
# limit, once per rank.
_NO_RESERVE = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)  # gives up the GIL meanwhile
_libc_with_gil = ctypes.PyDLL(None)  # for calls that return at once: giving up the GIL would take longer than they do


# Memory


_MAX_WRITE = 1 << 28  # bytes of a write


def memory_fd(name: str = "context-parallel") -> int:
    """Return a file in memory, which grows, has no name to leak, and does not count against /dev/shm. `name`: what lists of a
    process's files show."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def reserve(fd: int, size: int, start: int = 0) -> None:
    """Grow a memory file to `size`; it has pages below `start`. Raises OSError where there is no room, rather than a signal at the
    first write."""
    os.posix_fallocate(fd, start, size - start)


def write_at(fd: int, data: memoryview, start: int) -> None:
    """Write bytes into a file. Raises OSError: there is no room."""
    while data:
        count = os.pwrite(fd, data[:_MAX_WRITE], start)
        data, start = data[count:], start + count


def shrink(fd: int, size: int) -> None:
    """Give memory above a size back. Mappings stay, and get pages again when the file grows again."""
    os.ftruncate(fd, size)


def number_of(fd: int) -> int:
    """Return the number by which another process of this user opens a file of this one."""
    return fd


def foreign_fd(pid: int, number: int, *, writable: bool = True) -> int:
    """Open a file of another process. Raises OSError."""
    return os.open(f"/proc/{pid}/fd/{number}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)


def path_of(fd: int) -> str:
    """Return a path in this process that leads to an open file, whatever has its name by now."""
    return f"/proc/self/fd/{fd}"


def private_pages(fd: int) -> mmap.mmap:
    """Map a file. Writes stay in this process."""
    return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


file_pages = private_pages


store_path = path_of


@contextmanager
def store_file() -> Iterator[int]:
    """Make an empty file for a `torch.distributed.FileStore` at its `store_path`."""
    fd = memory_fd()
    try:
        yield fd
    finally:
        os.close(fd)


def mapped_files() -> list[tuple[int, int, str]]:
    """Return (first address, address after the last, path) of the files that this process has mapped, in order. Another file may
    have that path by now: see `file_ranges`."""
    return [(*span, words[5].rstrip("\n")) for span, words in _maps() if len(words) > 5 and words[5].startswith("/")]


def file_ranges(path: str) -> list[tuple[int, int, int]]:
    """Return (first address, address after the last, place in the file) of where this process has mapped the file of that path.

    Device and inode come from a page mapped for this purpose: on some file systems `stat` reports others than the kernel. Raises
    OSError: there is no such file.
    """
    with open(path, "rb") as file:
        page = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_COPY)
    at = address_of(page)
    found = _maps()
    ours = next(words[3:5] for (start, stop), words in found if start <= at < stop)
    own = at, at + mmap.PAGESIZE
    return [(*span, int(words[2], 16)) for span, words in found if words[3:5] == ours and span != own]


def _maps() -> list[tuple[tuple[int, int], list[str]]]:
    """Return the addresses of every mapping of this process, and the system's words for it."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as entries:
        words = [entry.split(maxsplit=5) for entry in entries]
    return [((int(start, 16), int(stop, 16)), each) for each in words for start, stop in (each[0].split("-"),)]


# Of the last of the eight bytes that pagemap has for a page: https://docs.kernel.org/admin-guide/mm/pagemap.html
_PRESENT, _SWAPPED, _SHARED = 1 << 7, 1 << 6, 1 << 5
_IS_OWN = bytes(kind & _SWAPPED > 0 or kind & (_PRESENT | _SHARED) == _PRESENT for kind in range(256))


def is_written(begin: int, end: int) -> bool:
    """Return whether this process has written to a page of a file that it has mapped at these addresses, and has it to itself."""
    first, after = begin // mmap.PAGESIZE * 8, -(-end // mmap.PAGESIZE) * 8
    with open("/proc/self/pagemap", "rb") as entries:
        entries.seek(first)
        return 1 in entries.read(after - first)[7::8].translate(_IS_OWN)


def release_pages(begin: int, end: int) -> None:
    """Drop a file's pages from this process's memory. They are read again when they are used."""
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Return this process's free memory to the system. glibc keeps memory on its heap below a used piece."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


# Processes


start = start_program


def wait_for(process: Program) -> None:
    """Wait for a process to end, and leave its status for `Popen.wait`: until then its number is no other one's."""
    with contextlib.suppress(ChildProcessError):  # code of others has waited for all children
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def die_with_parent(parent: int) -> None:
    """End this process when the parent ends, whatever ends it and whatever this process does then, such as holding the GIL in C.

    That takes the end of the parent's thread that started this one.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that ended before that call sends no signal any more.
    if os.getppid() != parent:
        os._exit(1)


send_signal = os.kill


def exit_now(code: int) -> NoReturn:
    """End this process without destructors and exit handlers, which could hang."""
    os._exit(code)


def name_process(name: str) -> None:
    """Set the name that `ps` shows for this process."""
    _libc.prctl(_PR_SET_NAME, name.encode())


def allow_open_files() -> None:
    """Raise the limit of open files to what this user may have.

    gloo listens on a port of the loopback interface and aborts the process when it cannot accept a connection. At the usual limit
    of 1,024, any local user could bring that about.
    """
    import resource  # Windows has none

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the kernel's own limit is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def name_of_exit(code: int) -> str:
    """Return the name of the signal behind a `Popen.returncode`; empty where the process ended by itself."""
    # Real-time signals have no name.
    return "" if code >= 0 else signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def cores() -> set[int]:
    """Return the numbers of the cores that this thread may run on."""
    return os.sched_getaffinity(0)


def set_affinity(numbers: set[int]) -> None:
    """Keep this thread, and those that it starts, to some cores. Raises OSError: a container may forbid it."""
    os.sched_setaffinity(0, numbers)


def user() -> int:
    """Return the number of this user, as of `os.stat`."""
    return os.getuid()


def environment_at_start() -> dict[str, str]:
    """Return the environment that this process was started with, without what it has set since."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return whole_environment()
    return {os.fsdecode(name): os.fsdecode(value) for name, separator, value in (e.partition(b"=") for e in entries) if separator}


# GPUs


def hidden_gpus() -> list[tuple[str, int, tuple[int, int]]]:
    """Return (name, bytes of memory, compute capability) of NVIDIA's GPUs in the order of their buses, where this process sees one
    of several only; else nothing."""
    return []


def visibility_env(device: str) -> tuple[str, dict[str, str]]:
    """Return (the device's name in its rank, environment variables of that)."""
    return device, {}


def loopback() -> str:
    """Return the name of the network interface that no other computer reaches."""
    return "lo"


# Between ranks


def host_id() -> int:
    """Return a number that ranks share if they are on one computer and in one container."""
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    return zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes() + "".join(spaces).encode())


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _function(library: ctypes.CDLL, name: str, *arguments: Any) -> Callable[..., int]:
    found: Any = getattr(library, name)
    found.argtypes = arguments
    function: Callable[..., int] = found
    return function


class Semaphores:
    """Semaphores of glibc in memory that processes map, known by their addresses. Raises AttributeError: this is not glibc 2.30 or
    newer.

    POSIX has `sem_post` and its waits synchronise memory (4.12), and glibc makes them a release and an acquire. None enters the
    kernel unless somebody sleeps.
    """

    def __init__(self) -> None:
        address = ctypes.c_void_p
        self._init = _function(_libc_with_gil, "sem_init", address, ctypes.c_int, ctypes.c_uint)
        self._wait = _function(_libc, "sem_clockwait", address, ctypes.c_int, ctypes.POINTER(_Time))
        self.post = _function(_libc_with_gil, "sem_post", address)
        self._try = _function(_libc_with_gil, "sem_trywait", address)

    def make(self, address: int) -> int:
        """Make one in 32 bytes; return its handle for the other methods. Raises OSError."""
        if self._init(address, 1, 0):
            raise OSError("no semaphores between processes")
        return address

    def open(self, address: int, owner: int) -> int:
        """Return the handle of one that another process has made."""
        return address

    def try_take(self, semaphore: int) -> bool:
        return self._try(semaphore) == 0

    def sleep(self, semaphore: int, seconds: float) -> bool:
        """Sleep until one can be taken, and take it. False: not within the time."""
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(seconds * 1e9)
        if self._wait(semaphore, time.CLOCK_MONOTONIC, _Time(*divmod(until, 1_000_000_000))) == 0:
            return True
        if (code := ctypes.get_errno()) not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))
        return False


def yield_core() -> None:
    """Let another process have this core."""
    os.sched_yield()


class Process:
    """A process of this computer. Raises OSError: it is not there."""

    def __init__(self, pid: int) -> None:
        # Of this process, even when another one has its number. Many builds of Python lack `os.pidfd_open`.
        self._folder = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def has_ended(self) -> bool:
        """Whether its parent can see it, too: of a killed process the first thread ends long before the last one, which frees the
        memory."""
        try:
            with open(os.open("stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder), "rb") as file:
                first_has = file.read().rpartition(b") ")[2][:1] in b"ZX"
            return first_has and self._threads == 1
        except (FileNotFoundError, ProcessLookupError):
            return True

    @property
    def _threads(self) -> int:
        folder = os.open("task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._folder)
        try:
            return len(os.listdir(folder))
        finally:
            os.close(folder)

    def __del__(self) -> None:
        if hasattr(self, "_folder"):
            os.close(self._folder)
