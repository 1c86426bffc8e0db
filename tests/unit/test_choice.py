"""How many ranks a call deserves: the prediction and the choice against made-up machines."""

import random
from dataclasses import replace

import pytest
from support.machines import FAST, GPU, SLOW, SLOW_LINK, Calls, everywhere, ranks_of, took, work

from cp_runtime.controller.placement import LIMIT, Shortages
from cp_runtime.engine.cost import Rates
from cp_runtime.timing.prediction import Run, Way, guess, link_of, on_one_rank, predict
from cp_runtime.timing.times import Times
from cp_runtime.words import words_in

INSIDE = (1e-5, 2e10)  # latency and bandwidth inside of a machine
LINK_50_MBIT = {"bandwidth": 6.25e6, "latency": 1e-3, "overlap": 0.0}
LOOPBACK = {"bandwidth": 1e9, "latency": 1e-4, "overlap": 0.0}
CPU = replace(GPU, flops=2e11, linear=2e11, **LOOPBACK)
CARDS = replace(GPU, flops=1e14, linear=1e14, **LINK_50_MBIT)


@pytest.fixture
def times(tmp_path):
    return Times(tmp_path / "times.json")


def settled(call, ranks, times, calls=12, own=0, **machine):
    """(number of ranks in the end, seconds of every call until then) on a made-up machine."""
    made = Calls(ranks, times, own)
    seconds = [made.run(call, **machine)[1] for _ in range(calls)]
    return made.chooser.choose("flux", ranks, everywhere, None), seconds


def test_a_fast_link_uses_all_ranks_and_a_slow_one_none(times, tmp_path):
    assert settled(work(75600), FAST, times)[0] == 4
    assert settled(work(1024), SLOW, Times(tmp_path / "others.json"))[0] == 1


@pytest.mark.parametrize("items", [1, 2])
@pytest.mark.parametrize("tokens", [1024, 16384])
@pytest.mark.parametrize(
    "link",
    [{}, {"bandwidth": 2e10}, {"bandwidth": 8e9, "latency": 5e-5}, {"bandwidth": 2e9, "overlap": 0.0}, SLOW_LINK],
    ids=["nvlink", "pcie 5", "pcie 4", "pcie 3", "ethernet"],
)
@pytest.mark.parametrize("speeds", [(1.0,) * 4, (1.0,) * 3, (2.0, 2.0, 1.0, 1.0), (1.0, 1.0, 1.0, 0.25), (1.0, 3.0)], ids=str)
def test_the_choice_is_nearly_the_best_candidate(items, tokens, link, speeds, times):
    """Fast and slow links, equal, unequal and one slow rank; the link is worse than measured, and runs scatter by 2 %."""
    shares = () if len(set(speeds)) == 1 else tuple(round(4 * speed) for speed in speeds)
    ranks, call, dice = ranks_of(speeds=speeds, shares=shares, rates=replace(GPU, **link)), work(tokens, items), random.Random(1)
    count, _ = settled(call, ranks, times, noise=lambda: dice.uniform(1, 1.02), link=1.5)
    seconds = {each: took(call, ranks, each, link=1.5).seconds for each in (1, ranks.size)}
    assert seconds[count] <= 1.05 * min(seconds.values())


@pytest.mark.parametrize("tokens", [1024, 4608, 32760])
@pytest.mark.parametrize("own", [1, 2, 4])
def test_the_first_call_over_a_slow_link_stays_on_this_computer(tokens, own, times):
    """Another computer at 50 Mbit/s, and nothing is known of the call but its latent and the sizes of the model's blocks."""
    ranks, call = ranks_of(own + 1, rates=CARDS, inside=INSIDE, own=own), work(tokens)
    expected = guess(12e9, 57, 2, (1, 16, 2, 2 * tokens), 1)
    made = Calls(ranks, times, own)
    counts = [made.run(call, guess=expected)[0] for _ in range(6)]
    assert set(counts) == {own}


def test_the_first_call_over_a_fast_link_takes_all_ranks(times):
    made, expected = Calls(FAST, times), guess(12e9, 57, 2, (1, 16, 128, 128), 1)
    assert [made.run(work(), guess=expected)[0] for _ in range(6)] == [4] * 6


def test_halves_of_cfg_go_to_another_computer_in_the_first_call(times):
    """They exchange their result only."""
    ranks, call = ranks_of(2, rates=CARDS, inside=INSIDE, own=1), work(32760, items=2)
    assert Calls(ranks, times, 1).run(call, guess=guess(12e9, 57, 2, (2, 16, 2, 65520), 2))[0] == 2


def test_what_is_guessed_of_a_call_is_about_right():
    """Flux 1: 57 blocks of width 3072, 4,096 tokens and a text; Wan 14B: 40 of width 5120, 75,600 tokens."""
    for parameters, blocks, latent, width, tokens in (
        (11.9e9, 57, (1, 16, 128, 128), 3072, 4608),
        (14e9, 40, (1, 16, 21, 90, 160), 5120, 75600),
    ):
        made = guess(parameters, blocks, 2, latent, 1)
        ((shape, count),) = made.attentions
        assert (count, shape.head_dim) == (blocks, 128)
        assert shape.heads * 128 == pytest.approx(width, rel=0.25)
        assert shape.queries == pytest.approx(tokens, rel=0.25)
        assert made.operations == 2 * parameters * shape.queries
    assert guess(1e9, 0, 2, (1, 4, 64, 64), 1) is None  # a UNet


def test_a_link_that_is_worse_than_measured_is_left_after_one_call(times):
    """It is two hundred times slower; the first call is far slower than one device should be."""
    ranks, call = ranks_of(2, rates=CPU), work(4352, parameters=3e8)
    made = Calls(ranks, times)
    assert [made.run(call, link=200.0)[0] for _ in range(8)] == [2, *[1] * 7]


def test_what_is_tried_is_no_slower_for_long(times):
    """The prediction says that one device is nearly as fast; it is not, and two calls there are all."""
    ranks, call = ranks_of(2, rates=replace(GPU, **SLOW_LINK)), work(2048)
    made, counts = Calls(ranks, times), []
    for _ in range(10):
        count = made.chooser.choose("flux", ranks, everywhere, None)
        counts.append(count)
        made.note(call, count, Run(1.0, 0.5, 0.5) if count == 2 else Run(1.8, 1.8, 0.0))
    assert counts == [2, 2, 1, 1, *[2] * 6]


def test_a_measurement_of_one_device_counts_for_the_choice(times):
    """By Measure, where the prediction had not asked for it. It needs no second time: one device is no faster as a rule."""
    made, call = Calls(FAST, times), work()
    assert [made.run(call)[0] for _ in range(3)] == [4] * 3
    for seconds, count in ((1.9 * took(call, FAST, 4).seconds, 4), (0.001, 1)):
        times.add("flux", made.chooser.who(FAST, 1), seconds)
        made.chooser.compared("flux", FAST)
        assert made.run(call)[0] == count


def test_what_does_not_fit_is_no_candidate(times):
    made, call = Calls(SLOW, times), work(1024)
    for _ in range(2):
        made.run(call)
    assert made.chooser.choose("flux", SLOW, everywhere, None) == 1
    assert made.chooser.choose("flux", SLOW, lambda count: count > 1, None) == 4
    assert {count: ranks_of(2, shares=(3, 1)).largest_part(count) for count in (1, 2)} == {1: 1.0, 2: 0.75}


def test_the_candidates(times):
    made = Calls(ranks_of(6), times, own=4)
    assert made.chooser.candidates(made.ranks) == [1, 4, 6]
    assert made.chooser.candidates(replace(made.ranks, sharded=True)) == [1, 6]
    assert Calls(FAST, times).chooser.candidates(FAST) == [1, 4]


def test_groups_are_those_that_ranks_form():
    assert FAST.way(work(), 4) == Way(4, 1)
    assert FAST.way(work(items=2), 4) == Way(4, 2)
    assert FAST.way(work(items=2, sequence=False), 4) == Way(4, 4)  # a UNet


def test_a_unet_shares_its_items_only():
    for items, gain in ((1, 1.0), (2, 2.0), (3, 3.0)):
        call = work(items=items, sequence=False)
        run = on_one_rank(call, FAST)
        assert run.seconds / predict(call, FAST, FAST.way(call, 4), Way(1), run) == pytest.approx(gain, rel=0.01)


def test_the_first_run_warms_up(times):
    """What ran once runs once more; then one call that is late does not matter, and a machine that became slower does."""
    made, call = Calls(FAST, times), work()
    made.note(call, 4, Run(9.0, 8.0, 1.0))
    assert made.chooser.choose("flux", FAST, everywhere, None) == 4
    for seconds in (1.0, 5.0, 1.1):
        made.note(call, 4, Run(seconds, seconds - 0.1, 0.1))
    assert made.chooser.described("flux", FAST, 4)["seconds"] == 1.0
    for _ in range(3):
        made.note(call, 4, Run(5.0, 4.9, 0.1))
    assert made.chooser.described("flux", FAST, 4)["seconds"] == 5.0


def test_a_first_run_that_makes_connections_is_not_held_against_all_ranks(times):
    made, call = Calls(FAST, times), work()
    run = took(call, FAST, 4)
    assert run.seconds < 0.5
    made.note(call, 4, replace(run, seconds=run.seconds + 1.5, communication=run.communication + 1.5))
    assert made.chooser.choose("flux", FAST, everywhere, None) == 4


def test_a_first_run_on_all_ranks_is_not_held_against_them_in_another_session(times):
    """It was far slower than one device, once."""
    made, call = Calls(FAST, times), work(16384)
    run = took(call, FAST, 4)
    made.note(call, 4, replace(run, seconds=run.seconds + 60, communication=run.communication + 60))
    assert [made.run(call)[0] for _ in range(2)] == [1, 1]
    again = Calls(FAST, times)  # new ranks: one is known
    assert [again.run(call, guess=call)[0] for _ in range(4)] == [1, 4, 4, 4]


def test_what_calls_show_about_the_link_goes_into_every_prediction():
    slow, call = replace(SLOW, link=10.0), work(16384)
    alone = took(call, SLOW, 1)
    told, untold = (predict(call, ranks, Way(2), Way(1), alone) for ranks in (slow, SLOW))
    communication = took(call, SLOW, 2).communication
    assert told - untold == pytest.approx(9 * communication, rel=0.01)
    run = took(call, SLOW, 2, link=2.0)  # a call that has been sending knows it better
    assert predict(call, slow, Way(4), Way(2), run) == pytest.approx(predict(call, SLOW, Way(4), Way(2), run))


def test_other_kinds_hear_what_one_call_showed_about_the_link(times):
    """Its first call, on all ranks, took three times as long as one device would: no other one does."""
    ranks = ranks_of(2, rates=CPU)
    made = Calls(ranks, times)
    assert [made.run(work(4352, parameters=3e8), link=200.0)[0] for _ in range(4)] == [2, 1, 1, 1]
    for tokens in (2448, 9792):
        call = work(tokens, parameters=3e8)
        assert made.run(call, kind=f"{tokens}", guess=call, link=200.0)[0] == 1


def test_where_the_host_is_the_limit_one_device_is_tried(times):
    """A GPU that waits for its host's launches: fewer tokens are no faster. By its operations alone it would be 4 times as fast."""
    made, call = Calls(FAST, times), work(256)
    launched = 10 * on_one_rank(call, FAST).seconds
    counts = []
    for _ in range(6):
        count = made.chooser.choose("flux", FAST, everywhere, None)
        counts.append(count)
        made.note(call, count, Run(launched * (1.2 if count > 1 else 1), launched, 0.0, launched))
    assert counts == [4, 4, 1, 1, 1, 1]
    unknown = replace(Run(launched, launched, 0.0), host=0.0)
    assert predict(call, FAST, Way(1), Way(4), unknown) > 3 * launched


def test_weights_that_ranks_keep_parts_of_travel_in_every_call():
    """12 GB, half of which each of two 4090 has to send: what the device computes meanwhile hides it."""
    card = Rates(latency=3e-5, bandwidth=4e9, flops=1.2e14, memory=1e12, overlap=1.0, linear=1.2e14, launch=5e-6)
    ranks, call = ranks_of(2, rates=card, sharded=True), replace(work(4608), weights=6 << 30)
    seconds = call.weights / card.bandwidth
    plain = {count: took(replace(call, weights=0), ranks, count) for count in (1, 2)}
    assert plain[2].compute < plain[1].compute < seconds
    runs = {}
    for count, run in plain.items():
        communication = run.communication + seconds - run.compute
        runs[count] = Run(run.compute + communication, run.compute, communication)
        assert link_of(call, ranks, Way(count), runs[count]) == pytest.approx(1.0, rel=0.01)
    assert predict(call, ranks, Way(2), Way(1), runs[1]) == pytest.approx(runs[2].seconds, rel=0.01)
    assert predict(call, ranks, Way(1), Way(2), runs[2]) == pytest.approx(runs[1].seconds, rel=0.01)
    slow = Run(2 * seconds, 2 * seconds, 0.0)  # hides all of it
    assert link_of(call, ranks, Way(1), slow) is None
    assert predict(call, ranks, Way(2), Way(1), slow) == pytest.approx(seconds + plain[2].communication, rel=0.1)


def test_what_stays_inside_a_machine_is_not_counted_as_sent_between_two():
    """CFG on two machines with two devices each: halves go to machines, and each half's attention stays on one."""
    rates = replace(GPU, latency=1e-3, bandwidth=5e7, overlap=0.0)
    call, alone = work(items=2), Run(10.0, 10.0, 0.0)
    across, inside = (ranks_of(4, rates=rates, **more) for more in ({}, {"inside": INSIDE, "own": 2}))
    apart, together = (predict(call, ranks, Way(4, 2), Way(1), alone) for ranks in (across, inside))
    assert together < 10 / 3 < 10 < apart
    one, other = (predict(call, ranks, Way(4, 1), Way(1), alone) for ranks in (across, inside))
    assert one == other > 10


def test_what_is_said_about_a_choice(times):
    """A number of ranks that would take less is not named: the calls to come take it, where memory allows."""
    ranks, call = ranks_of(2, rates=CPU), work(4352, parameters=3e8)
    made, said = Calls(ranks, times), []
    for link in (200.0, 200.0, 1.0, 1.0, 1.0):
        count, _ = made.run(call, link=link)
        said.append(words_in("en").choice(made.chooser.described("flux", ranks, count)))
    assert said[0] == "2 of 2 devices"
    assert all(
        words.startswith("1 of 2 devices; 2 would take ") and words.endswith(" times as long (measured)") for words in said[1:]
    )
    assert words_in("en").choice(None) == ""


def test_what_ran_out_of_memory_is_forgotten_when_there_is_too_much_of_it():
    shortages = Shortages()
    for number in range(LIMIT + 1):
        shortages.note(("cuda:0",), f"model {number}", "whole")
        shortages.note(("cuda:0",), "model 0", "sharded")
    assert shortages.of(("cuda:0",), "model 0") == {"whole", "sharded"}
    assert shortages.of(("cuda:0",), "model 1") == set()
    assert shortages.of(("cuda:0",), f"model {LIMIT}") == {"whole"}
