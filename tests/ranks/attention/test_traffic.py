"""What crosses between the ranks: as many collectives and bytes as the formulas say, and never a size."""

from itertools import groupby

import pytest
from support.ranks import run_ranks

SCRIPT = "attention/traffic_ranks.py"


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    return request.param, {(r["name"], tuple(r.get("lengths", ()))): r for r in run_ranks(SCRIPT, request.param)}


def factor(ring, ulysses):
    """Bytes sent per rank and attention, in units of tokens x heads x head dimension x element size."""
    return (4 * (ulysses - 1) / ulysses + 2 * (ring - 1)) / (ring * ulysses)


def test_bytes_are_those_of_the_formulas(ranks):
    world, reports = ranks
    even = [r for (_, lengths), r in reports.items() if lengths and all(n % world == 0 for n in lengths) and 8 % world == 0]
    for r in even:
        assert r["bytes"] / r["unit"] == pytest.approx(factor(r["ring"], r["ulysses"]), rel=0.01), r["name"]
    assert len(even) == {2: 8, 3: 0, 4: 12}[world]


def test_only_attention_crosses_and_no_sizes(ranks):
    """Every message is as many bytes of q, k, v or the output as was counted, and no other operation of torch.distributed runs."""
    for (name, lengths), r in ranks[1].items():
        if not lengths:
            continue
        assert {operation for operation, _, _ in r["operations"]} <= {"alltoall_base_", "send", "recv_", "memory"}, name
        assert {tuple(dtypes) for _, dtypes, _ in r["operations"]} == {("torch.uint8",)}
        sent = [numel for _, _, numels in r["operations"] for numel in numels if numel]
        assert sum(sent) == r["own_bytes"], name
        assert all(numel % (16 * 4) == 0 for numel in sent), name
        # q, k and v in one buffer to every other rank of a chunk, and the output back; k and v in one to the next rank of the ring
        messages = {"all_to_all": 2 * (r["ulysses"] - 1), "exchange": r["ring"] - 1, "all_gather": 2 * (r["ring"] - 1)}
        assert len(sent) == sum(n for kind, n in messages.items() if kind in r["counts"]), name
        collectives = {"all_to_all": 2, "exchange": r["ring"] - 1, "all_gather": 1}
        operations, total = [operation for operation, _, _ in r["operations"]], sum(r["counts"].values())
        if name.endswith("of devices"):
            # One call of torch for each, whatever the number of ranks: every further one is host time in every attention.
            assert operations == ["alltoall_base_"] * total, name
        elif not name.endswith("over sockets"):
            assert set(operations) == {"memory"}, name
        else:  # gloo asks for what it receives before it sends, or a link carries one direction after the other
            assert [operation for operation, _ in groupby(operations)] == ["recv_", "send"] * total, name
        assert r["counts"] == {kind: n for kind, n in collectives.items() if kind in r["counts"]}, name
        assert r["pending"] == 0
        assert set(r["through_memory"]) == {not name.endswith(("of devices", "over sockets"))}, name


def test_every_rank_knows_what_all_measured(ranks):
    world, reports = ranks
    measured = reports["measured", ()]
    assert measured["same"]
    assert (measured["ranks"], measured["kinds"]) == (world, 2)
    assert measured["inside"] == world  # of two computers


def test_an_error_inside_a_ring_leaves_a_trace(ranks):
    assert ranks[1]["left", ()]["pending"] == 1
