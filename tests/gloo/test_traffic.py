"""What crosses between the ranks: as many collectives and bytes as the formulas say, and never a size."""

from pathlib import Path

import pytest
from support.ranks import run_ranks

SCRIPT = Path(__file__).with_name("traffic_ranks.py")


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
    assert len(even) == {2: 3, 3: 0, 4: 5}[world]


def test_only_attention_crosses_and_no_sizes(ranks):
    """Every operation of torch.distributed is one that was counted, and carries floats, or floats as bytes: no integers."""
    for (name, lengths), r in ranks[1].items():
        if not lengths:
            continue
        done = {}
        for operation, dtypes, numel in r["operations"]:
            kind = {"alltoall_base_": "all_to_all", "_allgather_base_": "all_gather", "send": "exchange"}.get(operation, operation)
            done[kind] = done.get(kind, 0) + 1
            assert set(dtypes) <= {"torch.float32", "torch.uint8"}, (name, operation, dtypes)
            assert numel >= 16 * 4, (name, operation, numel)
        received = done.pop("recv_", 0)
        assert done == r["counts"], name
        assert received == done.get("exchange", 0)
        assert r["pending"] == 0


def test_an_error_inside_a_ring_leaves_a_trace(ranks):
    assert ranks[1]["left", ()]["pending"] == 1
