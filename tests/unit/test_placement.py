"""Where weights are kept: the first way that fits."""

from types import SimpleNamespace

import pytest

from cp_runtime.controller.placement import Demand, choose, next_smaller
from cp_runtime.controller.workers import Workers
from cp_runtime.engine.ranks.config import PipelineSettings
from cp_runtime.engine.weights.blocks import Sizes, spread
from cp_runtime.errors import UnsupportedError

GB = 10**9
# Flux 2 in bf16: 56 blocks.
DEMAND = Demand(Sizes(blocks=62 * GB, largest=GB, rest=2 * GB), call=4 * GB)


def config(weights="auto", ranks=2, memory_per_rank=0.0, pipeline=None):
    return SimpleNamespace(weights=weights, world_size=ranks, memory_per_rank=memory_per_rank, pipeline=pipeline)


@pytest.mark.parametrize(
    ("ranks", "room", "placement", "reason"),
    [
        (2, 80, "whole", "whole: 64 GB of weights on each of 2 devices of 80 GB"),
        (2, 66, "whole", "whole: 64 GB of weights on each of 2 devices of 66 GB"),
        (2, 65.9, "sharded", "sharded: 64 GB of weights as 2 × 35 GB of 65.9 GB"),
        (4, 24, "sharded", "sharded: 64 GB of weights as 4 × 19.5 GB of 24 GB"),
        (2, 24, "offloaded", "offloaded: 64 GB of weights as 2 × 4 GB of 24 GB"),
        (2, 2, "offloaded", "offloaded: 64 GB of weights as 2 × 4 GB, more than the 2 GB that are free"),
        (2, None, "whole", "whole: 64 GB of weights, which CPU ranks share"),
    ],
)
def test_auto_takes_the_first_that_fits(ranks, room, placement, reason):
    assert choose(config(ranks=ranks), DEMAND, room and room * GB) == (placement, reason, 0, 0)


BLOCKS = DEMAND._replace(sizes=DEMAND.sizes._replace(number=62))


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (66, ("whole", 0)),
        (65, ("sharded", 7)),  # 2 GB outside of blocks, 56 of whole ones, 2 of two at a time, half of 6, and 2 of the call
        (50, ("sharded", 37)),
        (40, ("sharded", 57)),
        (37, ("sharded", 0)),
        (36, ("offloaded", 33)),
        (7, ("offloaded", 0)),
    ],
)
def test_as_many_blocks_as_fit_stay_whole(room, expected):
    found = choose(config(), BLOCKS, room * GB)
    assert (found.placement, found.shared) == expected
    assert BLOCKS.per_rank(found.placement, 2, found.shared) <= room * GB
    if found.shared:
        assert BLOCKS.per_rank(found.placement, 2, found.shared - 1) > room * GB


def test_what_ran_out_of_memory_with_some_blocks_whole_shares_all():
    some = choose(config(), BLOCKS, 50 * GB)
    again = next_smaller(BLOCKS, some.tried, 2)
    assert choose(config(), BLOCKS, 50 * GB, again)[::3] == ("sharded", 0)
    from_host = choose(config(), BLOCKS, 36 * GB)
    assert choose(config(), BLOCKS, 36 * GB, next_smaller(BLOCKS, from_host.tried, 2))[::3] == ("offloaded", 0)


def test_a_larger_call_shares_more_blocks():
    larger = BLOCKS._replace(call=14 * GB)
    some = choose(config(), BLOCKS, 50 * GB)
    more = choose(config(), larger, 50 * GB, some.placement, least_shared=some.shared)
    assert more.placement == "sharded"
    assert some.shared < more.shared


def test_shared_blocks_are_far_from_each_other():
    assert [spread(range(10), count) for count in (1, 2, 3, 10)] == [[5], [2, 7], [1, 5, 8], [*range(10)]]


@pytest.mark.parametrize(
    ("free", "at_least", "placement", "most"),
    [
        ((96, 24), "whole", "whole", 1),
        ((96, 80, 80, 15), "whole", "whole", 3),
        ((96, 66, 80, 10), "whole", "whole", 3),
        ((67, 67, 24), "whole", "whole", 2),  # more of a call for each
        ((96, 48), "whole", "sharded", 0),
        ((24, 96), "whole", "offloaded", 0),  # calls take the first ones
        ((96, 24), "sharded", "offloaded", 0),  # it ran out of memory
    ],
)
def test_a_small_device_does_not_keep_the_model_off_the_others(free, at_least, placement, most):
    found = choose(config(ranks=len(free)), DEMAND, min(free) * GB, at_least, free=[each * GB for each in free])
    assert (found.placement, found.most) == (placement, most)


@pytest.mark.parametrize(("room", "placement"), [(70, "whole"), (40, "staged"), (24, "offloaded")])
def test_over_a_slow_link_a_model_that_fits_no_device_is_staged(room, placement):
    """A stage has all tokens of a call, so it takes more memory than a part of the weights with a part of the call."""
    assert choose(config(), DEMAND, room * GB, slow_link=True).placement == placement


def test_over_a_slow_link_what_ran_out_of_memory_is_not_tried_again():
    assert choose(config(), DEMAND, 1000 * GB, at_least="offloaded", slow_link=True).placement == "offloaded"


@pytest.mark.parametrize(("seconds", "waited", "slow"), [(3.0, 2.0, True), (2.0, 0.5, False), (2.0, 1.0, False)])
def test_a_link_is_slow_if_one_device_would_be_faster(seconds, waited, slow):
    """Of two ranks, each of which computes half of a call. The first call loads the weights."""
    report = SimpleNamespace(
        seconds=seconds, outcome=SimpleNamespace(prelude=0.0), communication=SimpleNamespace(seconds=waited), bytes={"weights": 9}
    )
    record = SimpleNamespace(reports=[report], at_work=2)
    assert not Workers._link_is_slow(SimpleNamespace(last_call=None), record)
    assert Workers._link_is_slow(SimpleNamespace(last_call=record), record) == slow


def test_pipefusion_is_staged():
    reason = choose(config(ranks=4, pipeline=PipelineSettings(stages=2)), DEMAND, None)
    assert reason == ("staged", "staged, as set: 64 GB of weights in 2 stages of 34 GB", 0, 0)


def test_a_call_needs_room_too():
    larger = DEMAND._replace(call=40 * GB)
    assert choose(config(), DEMAND, 66 * GB).placement == "whole"
    assert choose(config(), larger, 66 * GB).placement == "sharded"


def test_every_rank_has_room_for_controlnets():
    beside = DEMAND._replace(beside=(Sizes(blocks=2 * GB, largest=GB, rest=GB),))
    assert choose(config(), beside, 70 * GB).placement == "whole"
    assert choose(config(), beside, 68 * GB).reason.endswith("of 68 GB, beside 3 GB of ControlNets")
    assert [choose(config(), demand, 68 * GB).placement for demand in (DEMAND, beside)] == ["whole", "sharded"]


def test_what_has_run_out_of_memory_is_not_tried_again():
    assert choose(config(), DEMAND, 80 * GB, next_smaller(DEMAND, "whole", 2)).placement == "sharded"
    assert choose(config(), DEMAND, 80 * GB, next_smaller(DEMAND, "sharded", 2)).placement == "offloaded"
    assert next_smaller(DEMAND, "offloaded", 2) is None


@pytest.mark.parametrize(("largest", "smaller"), [(4, "sharded"), (8, "offloaded"), (12, None)])
def test_what_takes_more_is_no_way_out_of_memory(largest, smaller):
    """Of 21 GB in a few blocks, two of which are there at a time."""
    assert next_smaller(Demand(Sizes(blocks=20 * GB, largest=largest * GB, rest=GB), call=0), "whole", 2) == smaller


def test_what_is_set_and_takes_more_than_whole_weights_says_so():
    demand = Demand(Sizes(blocks=20 * GB, largest=8 * GB, rest=GB), call=0)
    more = "which is more than all of them"
    assert more in choose(config("sharded"), demand, None).reason
    assert more not in choose(config("offloaded"), demand, None).reason
    assert more not in choose(config("whole"), demand, None).reason


def test_a_model_without_blocks_stays_whole():
    demand = Demand(Sizes(blocks=0, largest=0, rest=64 * GB), call=0)
    assert choose(config(), demand, 24 * GB).reason == "whole: 64 GB of weights, none of which can be shared out"


def test_a_few_large_blocks_are_better_whole():
    """Two of them are there at a time, beside the part of all."""
    demand = Demand(Sizes(blocks=20 * GB, largest=12 * GB, rest=GB), call=0)
    reason = "whole: 21 GB of weights on each of 2 devices, more than the 16 GB that “GB to use of each GPU” of CP Config allows"
    assert choose(config(memory_per_rank=16.0), demand, 16 * GB) == ("whole", reason, 0, 0)


@pytest.mark.parametrize("weights", ["whole", "sharded", "offloaded"])
def test_what_is_set_is_obeyed(weights):
    assert choose(config(weights), DEMAND, None).placement == weights
    assert choose(config(weights), DEMAND, None).reason.startswith(f"{weights}, as set: 64 GB of weights")


def test_what_is_set_must_fit_into_a_limit_that_is_set():
    with pytest.raises(
        UnsupportedError, match="Got whole, with which each of 2 ranks needs 66 GB; “GB to use of each GPU” of CP Config allows 24"
    ):
        choose(config("whole", memory_per_rank=24.0), DEMAND, None)
    assert choose(config("offloaded", memory_per_rank=24.0), DEMAND, None).placement == "offloaded"
