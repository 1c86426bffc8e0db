"""The store in which ranks of several computers meet: as torch's own, and nothing for strangers."""

import json
import pickle
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.evil import attack
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from cp_runtime.pool.rendezvous import RankStore, Rendezvous


@pytest.fixture
def made():
    """Two ranks' stores of one rendezvous."""
    rendezvous = Rendezvous()
    socks = [rendezvous.connect() for _ in range(2)]
    yield [RankStore(sock, timedelta(seconds=30)) for sock in socks]
    for sock in socks:
        sock.close()


def test_it_behaves_as_torchs_own(made):
    def use(mine, other):
        mine.set("bytes", bytes(range(256)))
        yield other.get("bytes")
        mine.set("text", "é")
        yield other.get("text")
        yield [mine.add("sum", 3), other.add("sum", -1)], other.get("sum")
        yield mine.check(["text"]), mine.check(["text", "none"])
        yield mine.compare_set("swap", "", "a"), other.compare_set("swap", "x", "b"), mine.compare_set("swap", "a", "c")
        yield mine.delete_key("swap"), mine.delete_key("swap"), mine.check(["swap"])
        mine.wait(["text"], timedelta(seconds=1))
        yield mine.num_keys() > 0

    def prefixed(store):
        return dist.PrefixStore("pool", store)

    stock = dist.HashStore()
    assert [*use(*map(prefixed, made))] == [*use(prefixed(stock), prefixed(stock))]


def test_a_rank_waits_for_another_and_not_for_ever(made):
    one, other = made
    threading.Timer(0.1, other.set, ("late", b"x")).start()
    assert one.get("late") == b"x"
    with pytest.raises(dist.DistStoreError, match=r"another rank did not set never within 0\.05 s"):
        one.wait(["never"], timedelta(seconds=0.05))


def test_a_group_forms_over_it(made):
    results = {}

    def run(rank):
        store = dist.PrefixStore("group", made[rank])
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))
        x = torch.ones(3) * (rank + 1)
        group.allreduce([x]).wait()
        results[rank] = x

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[rank].tolist() for rank in range(2)] == [[3, 3, 3]] * 2


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"[1]", b'["set"]', b'["get", []]', b'["exec", "x"]', b"[" * 9999, b"\xff"])
def test_garbage_is_answered_with_an_error(line):
    assert "error" in Rendezvous().answer(line)


def test_it_ends_with_its_owner():
    ours, theirs = socket.socketpair()
    store = RankStore(ours, timedelta(seconds=1))
    theirs.close()
    with pytest.raises((dist.DistNetworkError, BrokenPipeError)):
        store.check(["x"])
    ours.close()


def test_a_line_is_one_answer():
    rendezvous = Rendezvous()
    with rendezvous.connect() as sock, sock.makefile("rb") as lines:
        sock.sendall(b'["add", "x", 1]\n["add", "x", 2]\n')
        assert [json.loads(lines.readline()) for _ in range(2)] == [{"value": 1}, {"value": 3}]


def test_the_stranger_of_other_tests_runs_code_where_torchs_store_is_open(tmp_path):
    """What torch elastic keeps there it unpickles. Else its failure elsewhere would prove nothing."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend = C10dRendezvousBackend(store, "run")
    backend.set_state(b"state", None)
    assert attack("127.0.0.1", store.port, tmp_path / "marker") == ["torch.rendezvous.run"]
    pickle.loads(backend.get_state()[0])  # noqa: S301  (as `DynamicRendezvousHandler` does, several times a second)
    assert (tmp_path / "marker").exists()
