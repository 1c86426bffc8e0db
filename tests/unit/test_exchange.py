"""Messages through shared memory, between exchanges that are all in this process, and what becomes of those that do not come."""

import gc
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from cp_runtime.engine.exchange import exchange, segment
from cp_runtime.engine.ranks.collectives import CommStats, RankGroup
from cp_runtime.system import posix, system

PIECE = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(exchange, "PIECE", PIECE)


def made(ranks=2, pids=(), timeout=20.0):
    """The exchanges of all ranks. `pids`: of their processes, where another one ends in their place."""
    own = [exchange._make(ranks) for _ in range(ranks)]
    pids = pids or [os.getpid()] * ranks
    found = []
    for rank in range(ranks):
        told = [[system.host_id(), os.getpid(), each.number, *each.token] for each, _ in own]
        opened = [exchange._open(numbers, ranks, own[rank][1])[0] for numbers in told]
        found.append(exchange.Exchange(rank, opened, [system.Process(pid) for pid in pids], own[rank][1], timeout))
    return found


def numbers(count, start=0):
    return torch.arange(start, start + count).to(torch.uint8)


def send(one, to, tensor):
    one.messages((), [(to, tensor)])


def coming(one, source, count):
    """What will arrive, and where."""
    target = torch.zeros(count, dtype=torch.uint8)
    return one.messages([(source, target)], ()), target


def passes(one, other, tensor):
    """Send a message from rank 0 to rank 1, and see it arrive."""
    send(one, 1, tensor)
    work, target = coming(other, 0, tensor.numel())
    work.wait()
    assert torch.equal(target, tensor)


def test_messages_of_all_sizes_arrive_in_order():
    """In pieces and in none, to several ranks at a time, while memory is used again."""
    draw, ranks = random.Random(0), made(3)
    for _ in range(50):
        size = draw.choice([1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE, draw.randrange(1, 20 * PIECE)])
        own = [numbers(size, rank) for rank in range(3)]
        targets = [torch.zeros(3, size, dtype=torch.uint8) for _ in range(3)]
        works = []
        for rank, one in enumerate(ranks):
            others = [other for other in range(3) if other != rank]
            arriving = [(other, targets[rank][other]) for other in others]
            works.append(one.messages(arriving, [(other, own[rank]) for other in others]))
        for rank, work in enumerate(works):
            work.wait()
            assert all(torch.equal(targets[rank][other], own[other]) for other in range(3) if other != rank)
    assert all(len(one._free) + len({id(slot) for sent in one._sent for slot in sent}) <= 12 for one in ranks)


def test_one_copy_serves_all_receivers():
    one, two, three = made(3)
    own = numbers(3 * PIECE)
    one.messages((), [(1, own), (2, own)])
    assert one.segments[0].size == one.segments[0].begin + 4096
    for other in (two, three):
        work, target = coming(other, 0, own.numel())
        work.wait()
        assert torch.equal(target, own)


def test_memory_grows_with_the_messages_and_is_used_again():
    one, two = made()
    sizes = []
    for count in (100, 100, 1 << 20, 1 << 20, 100, 1 << 20, 1 << 22):
        passes(one, two, numbers(count))
        sizes.append(one.segments[0].size - one.segments[0].begin)
    assert sizes == [4096] * 2 + [4096 + (1 << 20)] * 4 + [4096 + (1 << 20) + (1 << 22)]
    assert os.fstat(one.segments[0].fd).st_size == one.segments[0].size


def test_a_sender_does_not_wait_for_its_receiver():
    one, two = made()
    for number in range(segment.KEPT):
        send(one, 1, numbers(10, number))
    for number in range(segment.KEPT):
        work, target = coming(two, 0, 10)
        work.wait()
        assert torch.equal(target, numbers(10, number))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2)], ids=str)
def test_messages_may_be_waited_for_in_any_order_or_never(order):
    """Memory of one that nobody waits for is used again, and none before it is read."""
    one, two = made()
    for turn in range(20):
        works = [coming(two, 0, 3 * PIECE) for _ in range(3)]
        for number in range(3):
            send(one, 1, numbers(3 * PIECE, turn + number))
        for number in order:
            work, target = works[number]
            work.wait()
            assert torch.equal(target, numbers(3 * PIECE, turn + number))
        del works, work
    assert one.segments[0].size - one.segments[0].begin <= 6 * 4096


def test_what_is_thrown_away_in_the_middle_of_another_release_is_released_by_the_next_message():
    """As the garbage collector may, in any thread: it takes no lock, and counts nothing."""
    one, other = made()
    for begin in (0, PIECE):
        send(one, 1, numbers(PIECE, begin))
    other.space(2 * PIECE, torch.uint8)
    thrown = [coming(other, 0, PIECE)[0], other.parts(numbers(2 * PIECE), [PIECE, PIECE], [PIECE, PIECE])]
    with other._lock:
        thrown.clear()  # else this never ends
        gc.collect()
    before = one.segments[0].size
    for _ in range(3):
        passes(one, other, numbers(PIECE))
    one.trim()
    assert one.segments[0].size == one.segments[0].begin < before
    work, _ = coming(one, 1, PIECE)
    work.wait()
    other.trim()
    assert other.segments[1].size == other.segments[1].begin


def test_parts_are_read_where_they_lie():
    """This rank's own part among them; empty ones are left out. None is overwritten before its release."""
    ranks = made(3)
    sent = [[128, 256, 0], [0, 128, 384], [512, 0, 128]]  # of every rank, for every rank
    wanted = [[rank * 10 + to for rank in range(3) if sent[rank][to]] for to in range(3)]
    before = []
    for _ in range(5):
        parts = []
        for rank, one in enumerate(ranks):
            space = one.space(sum(sent[rank]), torch.int64)
            space.copy_(torch.cat([torch.full((nbytes // 8,), rank * 10 + to) for to, nbytes in enumerate(sent[rank])]))
            parts.append(one.parts(space, sent[rank], [each[rank] for each in sent]))
        for to, each in enumerate(parts):
            each.wait()
            assert [part.unique().item() for part in each.read()] == wanted[to]
            assert [part.nbytes for part in each.read()] == [sent[rank][to] for rank in range(3) if sent[rank][to]]
        for each in before:
            each.release()
        before = parts
    assert all(one.segments[rank].size - one.segments[rank].begin <= 3 * 4096 for rank, one in enumerate(ranks))


def test_a_number_for_all_ranks_waits_for_its_readers():
    """While each rank by turns is a call ahead of the others."""
    ranks, last = made(3), [0] * 3

    def value(rank, turn):
        return (turn, -turn << 40, (1 << 63) - turn)[rank]

    for turn in range(1, 2 * segment.PLACES):
        for rank, one in enumerate(ranks):
            while last[rank] < turn + (rank == turn % 3):
                last[rank] += 1
                assert one.publish(value(rank, last[rank])) == last[rank]
        assert [one.published(turn) for one in ranks] == [[value(rank, turn) for rank in range(3)]] * 3


def test_a_number_is_waited_for_until_it_is_whole():
    one, other = made()
    one.publish(5)
    other.publish(6)
    words, at = other.segments[1]._words, (segment.LINE + 16) // 8
    whole, words[at + 1] = words[at + 1], 0  # as long as half of it is written

    def finish():
        time.sleep(0.05)
        words[at + 1] = whole

    thread = threading.Thread(target=finish)
    thread.start()
    assert one.published(1) == [5, 6]
    thread.join()


def test_a_number_that_is_gone_is_not_waited_for():
    """The other rank has published many since, in calls that ended in errors before anybody looked."""
    one, other = made(timeout=0.3)
    place = one.publish(5)
    for turn in range(segment.PLACES + 1):
        other.publish(turn)
    assert one.published(place) == [5]


def test_a_number_that_never_comes_is_given_up(child):
    """When the timeout is over, or the rank has ended."""
    one, _ = made(timeout=0.3)
    one.publish(5)
    with pytest.raises(dist.DistBackendError, match=r"Timed out waiting 0\.3 s for rank 1"):
        one.published(1)
    one, _ = made(pids=[os.getpid(), child.pid])
    one.publish(5)
    child.kill()
    with pytest.raises(dist.DistBackendError, match="the process of rank 1 of the group has ended"):
        one.published(1)


def test_errors_in_a_row_use_up_no_places():
    """Messages that nobody waits for, and none behind them that somebody does."""
    one, other = made(timeout=1.0)
    for _ in range(2 * segment.KEPT):
        send(one, 1, numbers(8))
        coming(other, 0, 8)
    passes(one, other, numbers(3))


def test_what_is_made_and_never_sent_takes_no_memory():
    one, _ = made()
    for _ in range(10):
        one.space(8 * PIECE, torch.uint8)
    assert one.segments[0].size - one.segments[0].begin == 4096
    space = one.space(0, torch.float32)
    nothing = one.parts(space, [0, 0], [0, 0])
    assert nothing.read() == []


def test_tensors_of_the_same_memory_are_kept_and_not_without_end():
    """A rank reads what the other wrote last, also after that one gave its memory back and took it again."""
    one, two = made()
    for count in [*range(1, 2 * segment.VIEWS), *range(1, 100)]:
        passes(one, two, numbers(count, count))
        if count % 50 == 0:
            one.trim()
    assert all(len(each._views) <= segment.VIEWS for each in (*one.segments, *two.segments))


def test_memory_that_was_used_in_inference_mode_first_takes_messages_outside_of_it():
    one, two = made()
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            space = one.space(128, torch.float32)
            space.copy_(torch.ones(32))
            parts = one.parts(space, [0, 128], [0, 0]), two.parts(two.space(0, torch.float32), [0, 0], [128, 0])
            parts[1].wait()
            (part,) = parts[1].read()
            assert part.add_(1).tolist() == [2] * 32
            for each in parts:
                each.release()


def test_an_idle_rank_gives_its_memory_back():
    """Not while a message is under way, and both ranks still reach what comes later."""
    one, two = made()
    empty = one.segments[0].size
    for count in (1 << 20, 100, 1 << 21):
        one.space(PIECE, torch.uint8)  # and never sent
        work, target = coming(two, 0, count)
        send(one, 1, numbers(count))
        one.trim()
        assert one.segments[0].size > empty
        work.wait()
        assert torch.equal(target, numbers(count))
        one.trim()
        assert one.segments[0].size == os.fstat(one.segments[0].fd).st_size == empty


@pytest.fixture
def child():
    """A process that ends when it is told to."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


LARGE = """
import mmap, threading, time
memory = mmap.mmap(-1, 512 << 20)
for page in range(0, len(memory), 4096):
    memory[page] = 1
for _ in range(6):
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
print("ready", flush=True)
time.sleep(100)
"""


def test_a_process_ends_for_its_peers_no_sooner_than_for_its_parent():
    """Of a killed one with threads, the first has ended while the others free its memory."""
    with subprocess.Popen([sys.executable, "-c", LARGE], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        seen = system.Process(process.pid)
        assert not seen.has_ended
        process.kill()
        while not seen.has_ended:
            time.sleep(0.001)
        assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        assert process.wait() == -signal.SIGKILL
        assert seen.has_ended


@pytest.mark.parametrize("told", [0, 2])
@pytest.mark.parametrize("reaped", [True, False])
def test_a_rank_that_ends_ends_the_wait_for_it(child, reaped, told):
    """Before its message, or in the middle of it."""
    one, two = made(pids=[child.pid, os.getpid()])
    work, _ = coming(two, 0, 3 * PIECE)
    for _ in range(told):
        one._signals.post(one.segments[0].ready[1])  # a piece, and not the others
    child.kill()
    if reaped:
        child.wait()
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="Connection closed by peer: the process of rank 0 of the group has ended"):
        work.wait()
    assert time.monotonic() - began < 1


def test_what_a_rank_sent_before_its_end_arrives(child):
    one, two = made(pids=[child.pid, os.getpid()])
    work, target = coming(two, 0, 3 * PIECE)
    send(one, 1, numbers(3 * PIECE))
    child.kill()
    child.wait()
    work.wait()
    assert torch.equal(target, numbers(3 * PIECE))


def test_what_a_rank_sends_last_is_taken_though_it_has_ended(child, monkeypatch):
    one, two = made(pids=[child.pid, os.getpid()])
    work, target = coming(two, 0, 3)
    child.kill()
    child.wait()

    def sleep(*_):
        send(one, 1, numbers(3))  # between the end of this sleep and a look at the process
        return False

    monkeypatch.setattr(two._signals._system, "sleep", sleep, raising=False)
    work.wait()
    assert torch.equal(target, numbers(3))


def test_nothing_is_sent_where_there_is_no_room_for_all():
    """Else the next call would take it for its own."""
    one, two = made()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            one.messages((), [(1, numbers(3)), (1, numbers(2 << 20))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    passes(one, two, numbers(3, 10))


def test_what_is_empty_is_no_message():
    one, two = made()
    nothing, _ = coming(two, 0, 0)
    work, target = coming(two, 0, 3)
    for tensor in (numbers(0), numbers(3)):
        send(one, 1, tensor)
    nothing.wait()
    work.wait()
    assert torch.equal(target, numbers(3))


def test_a_wait_ends_with_the_timeout_and_takes_no_core():
    one, two = made(timeout=0.6)
    work, _ = coming(two, 0, 3 * PIECE)
    took = exchange.pieces(PIECE)
    one._signals.post(one.segments[0].ready[1])  # a piece, and not the others
    began, worked = time.monotonic(), time.thread_time()
    with pytest.raises(dist.DistBackendError, match=r"Timed out waiting 0\.6 s for rank 0 of the group"):
        work.wait()
    assert took == 1
    assert 0.5 < time.monotonic() - began < 3
    assert time.thread_time() - worked < 0.1


def test_a_receiver_that_never_reads_is_waited_for_at_last():
    one, _ = made(timeout=0.3)
    for _ in range(segment.KEPT):
        send(one, 1, numbers(1))
    with pytest.raises(dist.DistBackendError, match="Timed out"):
        send(one, 1, numbers(1))


def test_only_the_memory_that_is_meant_is_opened(tmp_path):
    """Numbers of processes and descriptors mean something else in another container or computer."""
    own, signals = exchange._make(2)
    other, _ = exchange._make(2)
    here, pid = system.host_id(), os.getpid()
    assert exchange._open([here, pid, own.number, *own.token], 2, signals) is not None
    assert exchange._open([here + 1, pid, own.number, *own.token], 2, signals) is None
    assert exchange._open([here, pid, other.number, *own.token], 2, signals) is None
    assert exchange._open([here, pid, 1 << 20, *own.token], 2, signals) is None
    assert exchange._open([here, 1 << 30, own.number, *own.token], 2, signals) is None
    with open(tmp_path / "short", "wb+") as file:
        assert exchange._open([here, pid, file.fileno(), *own.token], 2, signals) is None
    assert exchange._open([0] * 5, 2, signals) is None


@pytest.mark.parametrize("lacks", ["sem_clockwait", "memfd_create", "room", "host_id"])
def test_without_what_it_takes_there_is_no_exchange(monkeypatch, lacks):
    def no_room(*_):
        raise OSError("no space left")

    function = posix._function
    if lacks == "host_id":
        monkeypatch.setattr(os, "readlink", no_room)  # as where /proc is hidden
    elif lacks == "room":
        monkeypatch.setattr(os, "posix_fallocate", no_room)
    elif lacks == "memfd_create":
        monkeypatch.delattr(os, lacks)
    else:
        monkeypatch.setattr(posix, "_function", lambda library, name, *_: function(library, name.replace(lacks, "none_such")))
    assert exchange._make(2) is None


def test_nothing_is_left():
    """No descriptors, and no files."""
    gc.collect()  # what other tests left
    before, files = len(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm"))
    ranks = made(3)
    send(ranks[0], 1, numbers(1 << 20))
    assert sorted(os.listdir("/dev/shm")) == files
    del ranks
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_ring_that_is_left_in_the_middle_poisons_nothing():
    """As by an attention that fails on all ranks alike. More calls follow than a link keeps messages."""
    exchanges, groups = made(), [object.__new__(RankGroup) for _ in range(2)]
    for rank, group in enumerate(groups):
        group.rank, group.size, group.stats = rank, 2, CommStats()
    bytes_of_all = [3 * PIECE, 5]
    for turn in range(2 * segment.KEPT):
        around = []
        for rank, (one, group) in enumerate(zip(exchanges, groups, strict=True)):
            chunk = one.space(bytes_of_all[rank], torch.uint8)
            chunk.copy_(numbers(bytes_of_all[rank], rank))
            around.append(group.pass_around(one, chunk, bytes_of_all))
            next(around[rank])
        for rank, chunks in enumerate(around):
            if turn % 3 == rank:
                chunks.close()
            else:
                assert torch.equal(next(chunks), numbers(bytes_of_all[1 - rank], 1 - rank))
                assert next(chunks, None) is None
    before = [one.segments[rank].size for rank, one in enumerate(exchanges)]
    assert max(before) <= 40 * (3 * PIECE + mmap.PAGESIZE)
