"""Limits of the system, by names that users can look up."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from ..errors import PoolError

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
