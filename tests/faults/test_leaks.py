"""Cases 20 to 22: starting, stopping and failing leaves nothing behind; a lack of shared memory is an error and nothing more."""

import contextlib
import os
import resource
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from faults.owner import Owner, OwnerError, namespaces
from support.faults import SOAK, Stopwatch, note
from support.processes import outside_listeners, ranks

CYCLES = 50 if SOAK else 2
SHM = Path("/dev/shm")
MB = 1 << 20


# --- 20 ---------------------------------------------------------------------------------------------------------------


def descriptor_kinds(pid):
    """What the descriptors of a process refer to; sockets, pipes and the like without their numbers."""
    kinds = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            kinds[os.readlink(fd).partition(":[")[0]] += 1
    return kinds


def holdings(owner):
    """What could grow: in the owner, in its temporary folder."""
    process = psutil.Process(owner.pid)
    return {
        "descriptors": descriptor_kinds(owner.pid),
        "threads": process.num_threads(),
        "mapped blocks": Path(f"/proc/{owner.pid}/maps").read_text().count("memfd:context-parallel"),
        "processes": sorted(child.pid for child in process.children(recursive=True)),  # zombies too
        "temporary files": sorted(path.name for path in owner.temp.rglob("*")),
    }


def orphans(known):
    """What lies in the folder for named shared memory, is not `known`, and is mapped by nobody: other programs use it too."""
    new = [path for path in SHM.iterdir() if path not in known]
    maps = []
    for file in Path("/proc").glob("[0-9]*/maps") if new else ():
        with contextlib.suppress(OSError):
            maps.append(file.read_text())
    return [path for path in new if not any(str(path) in text for text in maps)]


def settled(owner, before, timeout=5.0):
    """What the owner holds, once it is what it was, or after some seconds: threads end a moment after their ranks."""
    deadline = time.monotonic() + timeout
    while (now := holdings(owner)) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return now


def assert_nothing_grew(owner, case, cycle):
    """Run `cycle` once to warm up, then many times; compare."""
    cycle(0)
    before, named = settled(owner, None, 0.5), list(SHM.iterdir())
    for number in range(CYCLES):
        cycle(number + 1)
    after = settled(owner, before)
    note(case, f"descriptors more after {CYCLES} cycles", 0, (after["descriptors"] - before["descriptors"]).total())
    note(case, f"threads more after {CYCLES} cycles", 0, after["threads"] - before["threads"])
    note(case, f"processes and zombies left after {CYCLES} cycles", 0, len(after["processes"]) - len(before["processes"]))
    assert after == before
    assert orphans(named) == []
    assert after["temporary files"] == []


def test_start_and_stop(temp):
    outside = []

    def cycle(_):
        pids = owner.ask("start", pool="a")["pids"]
        outside.extend(outside_listeners([owner.pid, *pids]))
        assert owner.ask("echo", pool="a", nbytes=MB)["same"]
        owner.ask("close", pool="a")

    with Owner(temp) as owner:
        assert_nothing_grew(owner, "20 start and stop", cycle)
    note("20 start and stop", "listeners outside loopback", 0, len(outside))
    assert outside == []


def test_crash_and_respawn(temp, faults):
    """By turns: a rank dies between two calls, and while the pool starts."""

    def cycle(number):
        rank = number % 2
        if number % 3 == 2:
            faults.arm(rank, "exit", at="start")
            with pytest.raises(OwnerError, match=f"rank {rank} .*exited with code 1") as caught:
                owner.ask("start", pool="a")
        else:
            pids = owner.ask("start", pool="a")["pids"]
            os.kill(pids[rank], signal.SIGKILL)
            with pytest.raises(OwnerError, match=f"rank {rank} .pid {pids[rank]}. failed: SIGKILL") as caught:
                owner.ask("echo", pool="a")
        assert "RankError" in caught.value.kinds
        assert ranks(owner.pid) == []
        assert not owner.ask("alive", pool="a")["alive"]

    with Owner(temp, faults.pool_environment) as owner:
        assert_nothing_grew(owner, "20 crash and respawn", cycle)
        owner.ask("start", pool="a")
        assert owner.ask("echo", pool="a")["same"]


# --- 21 ---------------------------------------------------------------------------------------------------------------


def test_nothing_is_left_where_everything_was_killed(temp):
    """Neither a file nor a folder, at any time: nothing has to be swept."""
    case = "21 restart after SIGKILL of everything"
    with Owner(temp) as owner:
        owner.ask("start", pool="a")
        assert list(temp.iterdir()) == []
        for process in owner.family():
            process.kill()
        assert owner.wait_alone(10) == []
    note(case, "stale folders left", 0, len(list(temp.iterdir())))
    assert list(temp.iterdir()) == []
    with Owner(temp) as owner:
        owner.ask("start", pool="a")
        owner.ask("start", pool="b")
        assert owner.ask("echo", pool="a")["same"]
        assert list(temp.iterdir()) == []


# --- 22 ---------------------------------------------------------------------------------------------------------------


def assert_no_room(call, of="shared memory"):
    """`call` fails with an error of this package that says what is lacking."""
    with pytest.raises(OwnerError) as caught:
        call()
    assert "ContextParallelError" in caught.value.kinds
    assert of in caught.value.message


def test_no_room_for_a_message(temp):
    """A memfd is limited by memory, and not by the size of /dev/shm; a limit on file sizes stops its growth in the same place."""
    with Owner(temp) as owner:
        owner.ask("start", pool="a")
        owner.ask("limit", nbytes=MB)
        watch = Stopwatch("22 no room for a message")
        assert_no_room(lambda: owner.ask("echo", pool="a", nbytes=64 * MB))
        watch.within(1, "the call has failed")
        owner.ask("limit", nbytes=None)
        assert owner.ask("alive", pool="a")["alive"]  # nothing was sent
        assert owner.ask("echo", pool="a", nbytes=64 * MB)["same"]
        assert owner.process.poll() is None


def test_no_room_for_a_result(temp):
    """Rank 0 cannot lay its result down. The same ranks serve a call that fits."""
    with Owner(temp) as owner:
        pids = owner.ask("start", pool="a")["pids"]
        allowed = resource.prlimit(pids[0], resource.RLIMIT_FSIZE)
        resource.prlimit(pids[0], resource.RLIMIT_FSIZE, (MB, allowed[1]))
        assert_no_room(lambda: owner.ask("echo", pool="a", nbytes=64 * MB))
        assert owner.ask("echo", pool="a", nbytes=MB // 2)["same"]
        resource.prlimit(pids[0], resource.RLIMIT_FSIZE, allowed)
        assert owner.ask("echo", pool="a", nbytes=64 * MB)["same"]
        assert sorted(rank.pid for rank in ranks(owner.pid)) == sorted(pids)


def test_no_room_to_start(temp):
    """Nothing of the pool that could not be made stays."""
    with Owner(temp) as owner:
        owner.ask("start", pool="a")
        owner.ask("close", pool="a")
        before = settled(owner, None, 0.5)
        for more in (2, 5, 8):  # descriptors: for a log, the pipes of a rank, those of the next
            owner.ask("limit_files", more=more)
            assert_no_room(lambda: owner.ask("start", pool="a"), "ulimit -n")
        owner.ask("limit_files", more=None)
        assert settled(owner, before) == before
        owner.ask("start", pool="a")
        assert owner.ask("echo", pool="a")["same"]


def test_a_full_dev_shm(temp):
    """Docker's is 64 MB. Nothing of a pool of CPU ranks lies there."""
    command = namespaces("--mount")
    if command is None:
        pytest.skip("a /dev/shm of its own needs unshare(1) and the right to make a mount namespace")
    fill = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && head -c 65536 /dev/zero > /dev/shm/full && exec "$@"'
    with Owner(temp, wrapper=[*command, "sh", "-c", fill, "sh"]) as owner:
        room = os.statvfs(f"/proc/{owner.pid}/root/dev/shm")
        assert (room.f_blocks * room.f_bsize, room.f_bavail) == (65536, 0)
        owner.ask("start", pool="a")
        assert owner.ask("echo", pool="a", nbytes=64 * MB)["same"]
