"""What ranks are started with: folders, environment, limits of the system, and a log."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from functools import lru_cache

from ..cache import cache_folder
from ..errors import PoolError
from ..system import system
from ..system.environment import library_setting, whole_environment
from .remote import INTERFACES

log = logging.getLogger("context_parallel")

OF_NCCL = {
    "TORCH_NCCL_HIGH_PRIORITY": "1",  # so that a ring's transfers get processors of the device beside attention
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # weights travel beside tokens, on a group of their own
}
# Variables that a launcher around ComfyUI may have left behind.
_FOREIGN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
# Of the threads that compute on CPUs. Node packs set some for what they do themselves, when all ranks would compute on one thread.
_THREADS = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_")


def _compiled_folder() -> str:
    """Return the folder for torch.compile's output: the one that the user names, or else one of this user.

    torch's own default is a folder in /tmp, which another user may have made. It writes that into the environment when it is first
    used, and ComfyUI uses it before it imports this pack.
    """
    said = library_setting("TORCHINDUCTOR_CACHE_DIR") or ""
    folder, name = os.path.split(said)
    by_torch = folder == tempfile.gettempdir() and name.startswith("torchinductor_")
    if said and not by_torch:
        return said
    kept = os.path.join(cache_folder(), "inductor")
    with contextlib.suppress(OSError):
        os.makedirs(kept, exist_ok=True)
    # torch makes the folder when it is imported. Where it cannot, as in a container with a read-only home, no rank starts.
    return kept if os.access(kept, os.W_OK | os.X_OK) and os.path.isdir(kept) else _temporary_folder()


@lru_cache
def _temporary_folder() -> str:
    """Return a folder for temporary files that is this user's alone; the same in every process if nobody else has made it."""
    folder = os.path.join(tempfile.gettempdir(), f"comfyui-context-parallel-{system.user()}")
    with contextlib.suppress(OSError):
        os.mkdir(folder, 0o700)
        return folder
    with contextlib.suppress(OSError):
        found = os.lstat(folder)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == system.user() and not found.st_mode & 0o022:
            return folder
    return tempfile.mkdtemp(prefix="comfyui-context-parallel-")


def child_environment(device_type: str, world_size: int) -> dict[str, str]:
    """Return the environment of a rank. The UI process's own is never written."""
    env = {k: v for k, v in whole_environment().items() if k not in _FOREIGN and not k.startswith(("TORCHELASTIC_", *_THREADS))}
    env |= {k: v for k, v in system.environment_at_start().items() if k.startswith(_THREADS)}
    env |= dict.fromkeys(INTERFACES, system.loopback())
    env["TORCHINDUCTOR_CACHE_DIR"] = _compiled_folder()
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # in the rank itself: more would be processes that outlive it
    if device_type == "cuda":
        env = OF_NCCL | env
    if device_type == "cpu":
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
        # glibc hands freed activations back to the kernel and faults them in again, in every block. Large ones it still may.
        env.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
        env.setdefault("MALLOC_TRIM_THRESHOLD_", str(256 << 20))
    return env


def as_host(rank: int) -> dict[str, str]:
    """Return variables that make NCCL take a rank for a computer of its own: it connects no two ranks of one computer on one GPU.

    They talk over TCP then, and their kernels take turns on the GPU: some ten milliseconds per exchange. For tests.
    """
    return {"NCCL_HOSTID": f"rank {rank}", "NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


# Exhausted resources by error number. The error's own text, such as "Resource temporarily unavailable", does not name them.
_LIMITS = {
    errno.EMFILE: "open files of a process (`ulimit -n`)",
    errno.ENFILE: "open files of the machine (fs.file-max)",
    errno.EAGAIN: "processes and threads of this user (`ulimit -u`) or of the container (pids.max)",
    errno.ENOMEM: "memory (or `ulimit -v`)",
    errno.EFBIG: "size of a file (`ulimit -f`)",
    errno.ENOSPC: "memory for shared files (/dev/shm, the container's limit)",
}
_NO_THREAD = "can't start new thread"


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Name the limit when the system has no more descriptors, memory or processes."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and _NO_THREAD not in str(error):
            raise
        raise PoolError(
            f"the workers could not be started: {error}.{name_limit(error)} Give ComfyUI's process more of it (`ulimit -a` shows "
            "its limits), or close what takes it, and queue the prompt again."
        ) from error


def name_limit(error: BaseException) -> str:
    """Return a sentence that names the limit behind a system error, with a leading blank; empty for any other error.

    The system's C++ code, such as gloo's, raises RuntimeError with the text only.
    """
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, RuntimeError) and (_NO_THREAD in str(error) or "Resource temporarily unavailable" in str(error)):
        code = errno.EAGAIN
    return f" The limit is that of {_LIMITS[code]}." if code in _LIMITS else ""


_LEVELS = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}


# What `faulthandler` writes.
_STACKS, _STACK_LINE = "Timeout (", re.compile(r'Thread 0x|Current thread 0x|  File "|  <|  \.\.\.')


class LogPump:
    """A thread that copies the lines of one process to the log until it has ended, each with the process's `name` in front.

    Attributes:
        fd: what the process writes to, a descriptor of this process's own while the pump is used as a context.
        stacks: the lines of the last stacks of all threads that it wrote.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stacks: list[str] = []
        self._last: deque[str] = deque(maxlen=12)
        read, self.fd = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(read,), name="context-parallel-log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(read)
            os.close(self.fd)
            raise

    def __enter__(self) -> LogPump:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def _run(self, read: int) -> None:
        with open(read, "rb") as lines:
            for line in lines:
                self._emit(line.decode(errors="replace").rstrip())

    def _emit(self, line: str) -> None:
        if not line:
            return
        name, separator, text = line.partition("|")
        level = _LEVELS.get(name) if separator else None
        line = text if level else line
        if line.startswith(_STACKS):
            self.stacks = []
        elif _STACK_LINE.match(line):
            self.stacks.append(line)
        elif not line.startswith("frame #"):  # of C++: dozens of them follow the line that says what is wrong
            self._last.append(line)
        log.log(level or logging.INFO, "[%s] %s", self.name, line)

    def finish(self) -> list[str]:
        """Let the last lines of a process that has ended arrive, and return them. A child of it may hold its output open."""
        self._thread.join(0.2)
        return list(self._last)
