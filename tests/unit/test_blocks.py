"""Memory that two processes map."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cp_runtime.errors import PoolError
from cp_runtime.pool import blocks
from cp_runtime.pool.blocks import Relay, Shared, SharedBlock
from cp_runtime.system import system


def test_shared_block_grows_and_shrinks_under_both_mappings():
    ours = SharedBlock()
    theirs = SharedBlock(system.foreign_fd(*ours.address))
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
    theirs.close()


def test_bytes_of_a_message_are_handed_on(monkeypatch):
    monkeypatch.setattr(blocks, "KEEP_BYTES", 1 << 20)
    first = Relay()
    second = Relay(first.address)
    large, small = bytes(range(256)) * (5 << 12), b"abc"
    with ThreadPoolExecutor() as threads:
        for seq, body in ((3, small), (4, large), (9, bytearray(small)), (10, large)):
            waiting = threads.submit(second.get, seq, len(body))
            time.sleep(0.05)
            assert not waiting.done()
            first.put(seq, body)
            assert waiting.result(timeout=10).numpy().tobytes() == body


def test_a_closed_block_says_so():
    """And does not look at whatever has its descriptor now."""
    block = SharedBlock()
    block.view(10)
    block.close()
    for use in (lambda: block.view(10), lambda: block.trim(1)):
        with pytest.raises(PoolError, match="closed"):
            use()


def test_what_a_pool_shares_is_found_by_its_addresses():
    shared = Shared()
    shared.request.view(3).fill_(5)
    found = shared.addresses
    assert {pid for pid, _ in found.values()} == {os.getpid()}
    there = SharedBlock(system.foreign_fd(*found["request"]))
    assert there.view(3).tolist() == [5, 5, 5]
    there.close()
    shared.close()
    with pytest.raises(OSError, match=r"."):
        system.foreign_fd(*found["store"])
