"""The file in which ranks of several computers meet: each computer has its own, and all have the same in them."""

import multiprocessing
import threading
import time
from datetime import timedelta
from io import FileIO

import pytest
import torch
import torch.distributed as dist

from cp_runtime.errors import ProtocolError
from cp_runtime.machines.store import StoreFile
from cp_runtime.system import system

PATIENCE = timedelta(seconds=30)


def carry(here, there):
    """Be the connection of two computers, until this process is killed."""
    ends = [StoreFile(here), StoreFile(there)]
    while True:
        for one, other in (ends, ends[::-1]):
            if news := one.news():
                other.append(news)
        time.sleep(0.002)


@pytest.fixture
def copies():
    """Descriptors of the files on three computers, the first of which is ComfyUI's: it is connected to the two others.

    By processes, as there: a `FileStore` waits for the file's lock with the GIL."""
    files = [FileIO(system.memory_fd(), "r+") for _ in range(3)]
    here, *others = (file.fileno() for file in files)
    running = [multiprocessing.get_context("fork").Process(target=carry, args=(here, there), daemon=True) for there in others]
    for process in running:
        process.start()
    yield [here, *others]
    for process in running:
        process.kill()
        process.join()
    for file in files:
        file.close()


def store(fd, world_size=3):
    made = dist.FileStore(f"/proc/self/fd/{fd}", world_size)
    made.set_timeout(PATIENCE)
    return made


def test_what_one_sets_all_get(copies):
    stores = [store(fd) for fd in copies]
    for number, each in enumerate(stores):
        each.set(f"key {number}", bytes([number, 0, 255]))
    assert [each.get(f"key {number}") for each in stores for number in range(3)] == 3 * [bytes([n, 0, 255]) for n in range(3)]
    stores[1].set("key 0", "again")
    until = time.monotonic() + 30
    while stores[2].get("key 0") != b"again":
        assert time.monotonic() < until


def test_many_at_once_lose_nothing(copies):
    """Entries appear whole, whoever writes at the same time."""

    def write(fd):
        mine = store(fd)
        for number in range(200):
            mine.set(f"{fd} {number}", str(number) * 50)

    threads = [threading.Thread(target=write, args=(fd,)) for fd in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fd in copies:
        reader = store(fd)
        assert all(reader.get(f"{each} {number}") == str(number).encode() * 50 for each in copies for number in range(200))


def test_what_a_computer_tells_is_limited(copies):
    with pytest.raises(ProtocolError, match="more than 16777216 bytes"):
        StoreFile(copies[0]).append(bytes((1 << 24) + 1))


def test_a_group_forms(copies):
    results = {}

    def run(rank):
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", store(copies[rank])), rank, 3, PATIENCE)
        x = torch.full((3,), float(rank))
        group.allreduce([x]).wait()
        results[rank] = x.tolist()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(3), [3.0] * 3)
