"""Ranks of one computer exchange through shared memory: the same bits and figures as over sockets, on each axis for itself."""

import os

import pytest
from support.pools import small_pool
from support.ranks import run_ranks

NAME = "memfd:context-parallel-exchange"


@pytest.fixture(scope="module")
def ranks():
    (found,) = run_ranks("attention/exchange_ranks.py", 4)
    return found


def test_bits_and_figures_are_those_over_sockets(ranks):
    assert ranks["wrong"] == []


def test_cpu_kernels_read_the_tokens_of_each_head_side_by_side(ranks):
    """In the ring this rank's own as well; that is up to 1.5 times as fast as tokens of all heads."""
    assert [all(each) for each in ranks["by_head"]] == [True] * 4


def test_an_axis_uses_it_if_its_ranks_are_on_one_computer(ranks):
    """Two ranks on each of two computers: Ulysses within, the ring between them."""
    for used in ranks["used"]:
        assert used["shared"] == {"ring": True, "ulysses": True, "whole": True}
        assert used["sockets"] == {"ring": False, "ulysses": False, "whole": False}
        assert used["two computers"] == {"ring": False, "ulysses": True, "whole": False}


def test_repeated_calls_take_no_more_memory(ranks):
    """A rank that runs ahead may need some more, once."""
    assert max(ranks["grew"]) <= ranks["sent"] / 8


def test_ranks_of_a_pool_use_it():
    with small_pool() as pool:
        for pid in pool.pids:
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            assert sum(link.startswith("/" + NAME) for link in links) >= 3  # its own, and both once more


@pytest.mark.parametrize("world", [2, 4])
def test_blocks_of_a_call_share_a_program(world):
    """Once per call where all parts are equal; no host waits, no two streams race (the stand-in raises), and the bits are those of
    exchanges of their own."""
    found = run_ranks("attention/program_ranks.py", world, backend="nccl")
    assert len(found) == 6
    for each in found:
        assert each["right"] == [[True] * 3] * world, each


def test_devices_copy_to_and_from_it_while_they_compute():
    """No host waits, no two streams race (the stand-in raises), and attention is that of CPU ranks."""
    (found,) = run_ranks("attention/device_exchange_ranks.py", 3, backend="nccl")
    assert found["difference"] <= 1e-6
    assert found["waits"] == [[]] * 3
    assert found["kept"] == [True] * 3
    assert found["said"].endswith("and shared memory failed: the other one is gone")
