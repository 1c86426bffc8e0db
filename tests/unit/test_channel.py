import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cp_runtime.errors import PoolError, PoolTimeout, ProtocolError
from cp_runtime.pool.channel import Channel, Closed, SharedBlock
from cp_runtime.pool.messages import Drop, pack


@pytest.fixture
def pair():
    a, b = socket.socketpair()
    ours, theirs = Channel(a), Channel(b)
    yield ours, theirs
    ours.close()
    theirs.close()


def soon():
    return time.monotonic() + 5


def test_frames_arrive_whole_and_in_order(pair):
    ours, theirs = pair
    for i in range(3):
        ours.send(pack(Drop(keys=("x" * 1000,)), i))
    assert [theirs.receive(soon()).seq for _ in range(3)] == [0, 1, 2]
    assert theirs.poll() is None


def test_a_receive_ends_at_its_deadline(pair):
    began = time.monotonic()
    with pytest.raises(PoolTimeout):
        pair[0].receive(began + 0.2)
    assert time.monotonic() - began > 0.15
    with pytest.raises(PoolTimeout):
        pair[0].receive(began)  # past already


def test_a_send_that_nobody_reads_does_not_wait_and_the_rest_goes_later(pair):
    ours, theirs = pair
    began = time.monotonic()
    ours.send(pack(Drop(keys=("y" * (8 << 20),)), 1))
    ours.send(pack(Drop(keys=()), 2))
    assert time.monotonic() - began < 2
    assert ours.has_unsent
    frames = []
    while len(frames) < 2:
        ours.flush()
        frames += [] if (frame := theirs.poll()) is None else [frame]
    assert [frame.seq for frame in frames] == [1, 2]
    assert len(frames[0].message.keys[0]) == 8 << 20
    assert not ours.has_unsent


def test_a_receiver_sends_what_is_left(pair):
    ours, theirs = pair
    ours.send(pack(Drop(keys=("y" * (8 << 20),)), 1))
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(ours.receive, soon())
        assert theirs.receive(soon()).seq == 1
        theirs.send(pack(Drop(keys=()), 2))
        assert waiting.result().seq == 2


def test_a_frame_cut_off_by_death_is_never_returned(pair):
    ours, theirs = pair
    ours.sock.setblocking(True)
    ours.sock.sendall(struct.pack("<Q", 100) + b'{"seq": 1')
    assert theirs.poll() is None
    ours.close()
    with pytest.raises(Closed):
        theirs.receive(soon())


@pytest.mark.parametrize("frame", [struct.pack("<Q", 1 << 40), struct.pack("<Q", 3) + b"abc", struct.pack("<Q", 2) + b"[]"])
def test_malformed_frames_raise(pair, frame):
    pair[0].sock.send(frame)
    with pytest.raises(ProtocolError):
        pair[1].receive(soon())


def test_shared_block_grows_and_shrinks_under_both_mappings():
    ours = SharedBlock()
    theirs = SharedBlock(ours.fd)
    ours.view(100).fill_(7)
    assert theirs.view(100).sum() == 700
    ours.view(1 << 20).fill_(1)
    assert theirs.view(1 << 20).sum() == 1 << 20
    ours.trim(4096)
    again = ours.view(1 << 20)
    assert again[4096:].sum() == 0  # the pages were given back
    again.fill_(2)
    assert (theirs.view(1 << 20) == 2).all()
    assert torch.equal(ours.view(10), theirs.view(10))
    ours.close()


def test_a_closed_block_says_so():
    """And does not look at whatever has its descriptor now."""
    block = SharedBlock()
    block.view(10)
    block.close()
    for use in (lambda: block.view(10), lambda: block.trim(1)):
        with pytest.raises(PoolError, match="closed"):
            use()
