"""What a test asks about processes: which belong to a server, and what they hold."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

RANK_NAME = "cp-rank-"  # as in cp_runtime/pool/rank_program.py
GONE = (psutil.NoSuchProcess, psutil.ZombieProcess)


def alive(process: psutil.Process) -> bool:
    """True while the process runs. One that ended and is not reaped yet does not count."""
    with contextlib.suppress(*GONE):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def command_line(process: psutil.Process) -> str:
    """The command line, empty when the process is gone or not ours."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def descendants(pid: int) -> list[psutil.Process]:
    """Living children of `pid`, and theirs."""
    with contextlib.suppress(*GONE):
        return [child for child in psutil.Process(pid).children(recursive=True) if alive(child)]
    return []


def ranks(pid: int) -> list[psutil.Process]:
    """Living ranks of the process `pid`."""
    return [child for child in descendants(pid) if _name(child).startswith(RANK_NAME)]


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(*GONE):
        return str(process.name())
    return ""


def with_environment(name: str, value: str) -> list[psutil.Process]:
    """Living processes of this user that were started with the environment variable `name` set to `value`.

    Finds children whose parents are gone as well, which no walk down the tree does.
    """
    return _living(lambda process: process.environ().get(name) == value)


def inside(folder: Path) -> list[psutil.Process]:
    """Living processes of this user whose working directory is `folder`."""
    return _living(lambda process: process.cwd() == str(folder))


def _living(wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it is gone, or another user's
            if wanted(process) and alive(process):
                found.append(process)
    return found


def wait_gone(processes: Iterable[psutil.Process], timeout: float) -> list[psutil.Process]:
    """Wait until all have ended, for at most `timeout` seconds. Returns those that have not."""
    deadline = time.monotonic() + timeout
    left = [process for process in processes if alive(process)]
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [process for process in left if alive(process)]
    return left


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL every one that still runs."""
    for process in processes:
        with contextlib.suppress(*GONE):
            process.kill()


class OtherPrograms:
    """How many cores all but this process and its descendants use, from here on. A hypervisor that takes a core away counts."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._began, self._before = time.monotonic(), self._seconds()

    def cores(self) -> float:
        """The mean since the begin, of the cores that this process may use."""
        return max(0.0, (self._seconds() - self._before) / (time.monotonic() - self._began))

    def _seconds(self) -> float:
        """Seconds for which those cores were busy with others, as /proc/stat and the processes count them."""
        times = psutil.cpu_times(percpu=True)
        cores = [times[core] for core in os.sched_getaffinity(0)]
        busy = sum(core.user + core.nice + core.system + core.irq + core.softirq + core.steal for core in cores)
        for process in [self._process, *self._process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                own = process.cpu_times()  # of children that have ended, too
                busy -= own.user + own.system + own.children_user + own.children_system
        return busy


def rss(pid: int) -> int:
    """Resident bytes, shared pages counted in full."""
    return psutil.Process(pid).memory_info().rss


def held(pid: int) -> int:
    """Resident bytes that are no pages of files: they do not change when another process that shares some of them ends."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def pss(pid: int) -> int:
    """Resident bytes, each shared page divided by the number of processes that share it: those of several processes add up."""
    return psutil.Process(pid).memory_full_info().pss


def pss_where(pid: int, wanted: Callable[[str], bool]) -> int:
    """The same of mappings that are wanted, by their file or what the kernel calls them; memory of the process's own is ""."""
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):
            counts = wanted(rest[4] if len(rest) > 4 else "")
        elif first == "Pss:" and counts:
            total += 1024 * int(rest[0])
    return total


def outside_listeners(pids: Iterable[int]) -> list[tuple[int, Any]]:
    """Sockets of these processes that another machine could connect to."""
    found: list[tuple[int, Any]] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(pid).net_connections("inet"):
                address = connection.laddr.ip.removeprefix("::ffff:")
                if connection.status == psutil.CONN_LISTEN and not (address.startswith("127.") or address == "::1"):
                    found.append((pid, connection.laddr))
    return found
