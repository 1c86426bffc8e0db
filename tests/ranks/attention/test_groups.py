"""Process groups: made by all ranks in one order, whatever ran before on some of them."""

import psutil
import pytest
from support.operations import disagreements
from support.pools import small_pool
from support.ranks import COMFY, run_ranks


@pytest.mark.bits("the same products, of weights whose bytes came back")
@pytest.mark.parametrize("mode", ["fresh", "once"])
def test_every_order_of_calls_loads_and_decodes(mode):
    """With the right results, and the same operations on every group on all of its ranks, in one order."""
    (report,) = run_ranks("attention/group_ranks.py", 4, mode, timeout=60)
    assert report["wrong"] == []
    # For weights all, for tokens {0, 1, 2}, {0, 1} as the first two, a half and an axis of two by two, {0, 2} as its other axis.
    assert report["groups"] <= 4
    assert report["disagreements"] == []
    assert report["kinds"] == ["all_reduce", "barrier", "messages"]  # through memory all others are messages between pairs


def entry(sent, arriving, name="1", operation="all_to_all"):
    return (name, [0, 1], operation, {0: sent, 1: sent}, {0: arriving, 1: arriving})


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ([entry(6, 4), entry(8, 8, "2")], 0),
        ([entry(8, 8, "2"), entry(6, 4)], 1),  # another order
        ([entry(6, 4)], 1),
        ([entry(4, 6), entry(8, 8, "2")], 1),  # other bytes
        ([entry(6, 4, operation="messages"), entry(8, 8, "2")], 1),
        ([entry(6, 4, "3"), entry(8, 8, "2")], 1),
    ],
)
def test_ranks_that_disagree_are_told(theirs, told):
    assert len(disagreements([[entry(4, 6), entry(8, 8, "2")], theirs])) == told


def test_groups_for_degrees_that_are_asked_for_are_there_when_the_ranks_are():
    """Each connects its ranks at once: over NCCL it takes memory, of which there is enough before a model is loaded."""

    def connections(**degrees):
        with small_pool(4, **degrees) as pool:
            found = psutil.Process(pool.pids[0]).net_connections("inet")
            return sum(each.status == psutil.CONN_ESTABLISHED for each in found)

    assert connections(ring_degree=2, ulysses_degree=2) == connections() + 2


def test_cpu_ranks_open_no_context_on_a_gpu():
    """On a computer that has some: a context takes hundreds of megabytes of the GPU that ComfyUI's own process computes on."""
    script = "attention/no_context_ranks.py"
    (report,) = run_ranks(script, 4, preload=COMFY, prepare=["flux"], timeout=120)
    assert report["asked"] == [[]] * 4
    assert report["kept"] > 0
    assert report["difference"] <= report["tolerance"]
