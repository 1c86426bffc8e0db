"""How many ranks a call deserves: the prediction against made-up machines."""

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from support import machines
from support.machines import ALONE, FAST, GPU, SLOW, SLOW_LINK, all_ranks, everywhere, pool, took, work
from support.reports import call_report

from cp_runtime.controller.calls import CallKind, Chooser, in_words
from cp_runtime.controller.placement import LIMIT, Shortages
from cp_runtime.engine.cost import Rates
from cp_runtime.engine.policy import TRIES, CallSplit, CallWork, Known, Run, candidates, largest_part, link_of, predict
from cp_runtime.pool.config import DeviceInventory, RuntimeConfig


def settled(call, ranks, calls=12, default=None, **machine):
    """(split that runs in the end, seconds of every call until then) on a made-up machine."""
    default = default or all_ranks(ranks)
    known, seconds = Known(call, default), []
    known.note(default, took(call, ranks, default, **machine))
    for _ in range(calls):
        split = known.choose(ranks, everywhere)
        run = took(call, ranks, split, **machine)
        known.note(split, run)
        seconds.append(run.seconds)
    return known.choose(ranks, everywhere), seconds, known


def test_a_fast_link_uses_all_ranks_and_a_slow_one_none():
    assert settled(work(75600), FAST)[0].at_work == 4
    assert settled(work(1024), SLOW)[0] == ALONE


@pytest.mark.parametrize("items", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1024, 4608, 16384, 75600])
@pytest.mark.parametrize(
    "link",
    [{}, {"bandwidth": 2e10}, {"bandwidth": 8e9, "latency": 5e-5}, {"bandwidth": 2e9, "overlap": 0.0}, SLOW_LINK],
    ids=["nvlink", "pcie 5", "pcie 4", "pcie 3", "ethernet"],
)
@pytest.mark.parametrize("speeds", [(1.0,) * 4, (1.0,) * 3, (2.0, 2.0, 1.0, 1.0), (1.0, 1.0, 1.0, 0.25), (1.0, 3.0)], ids=str)
def test_the_choice_is_nearly_the_best_of_all_candidates(items, tokens, link, speeds):
    """Fast and slow links, equal, unequal and one slow rank; the link is worse than measured, and runs scatter by 2 %."""
    shares = () if len(set(speeds)) == 1 else tuple(round(4 * speed) for speed in speeds)
    ranks, call, dice = pool(speeds=speeds, shares=shares, rates=replace(GPU, **link)), work(tokens, items), random.Random(1)
    split, _, _ = settled(call, ranks, noise=lambda: dice.uniform(1, 1.02), link=1.5)
    seconds = {each: took(call, ranks, each, link=1.5).seconds for each in candidates(call, ranks)}
    best, alone = min(seconds.values()), seconds[ALONE]
    assert seconds[split] <= 1.10 * best
    assert seconds[split] <= 1.05 * alone


def test_few_splits_are_tried():
    for ranks in (FAST, SLOW, pool(8, rates=replace(GPU, **SLOW_LINK))):
        for tokens in (512, 4096, 32768):
            _, _, known = settled(work(tokens), ranks, calls=30)
            assert len(known.runs) <= TRIES


def test_ranks_that_are_near_each_other_are_taken_together():
    near, far = (1e-5, 4e10), (1e-5, 1e9)
    pairs = tuple(((i, j), near if (i, j) in ((0, 2), (1, 3)) else far) for i in range(4) for j in range(i + 1, 4))
    assert pool(pairs=pairs).fastest(2) == (0, 2)
    assert pool(speeds=[1.0, 1.0, 1.0, 2.0], shares=(4, 4, 4, 8), pairs=pairs).fastest(2) == (0, 3)
    assert pool().fastest(3) == (0, 1, 2)


def test_what_does_not_fit_is_no_candidate():
    call, known = work(1024), Known(work(1024), all_ranks(SLOW))
    known.note(all_ranks(SLOW), took(call, SLOW, all_ranks(SLOW)))
    known.note(all_ranks(SLOW), took(call, SLOW, all_ranks(SLOW)))
    assert known.choose(SLOW, everywhere).at_work == 1
    assert known.choose(SLOW, lambda part: part < 0.3).at_work == 4
    uneven = pool(2, speeds=[3.0, 1.0], shares=(3, 1))
    parts = {split.at_work: largest_part(call, uneven, split) for split in candidates(call, uneven)}
    assert parts == {1: 1.0, 2: 0.75}


def test_what_settings_refuse_is_no_candidate():
    odd = work(tokens=4609)
    assert {split.at_work for split in candidates(odd, pool(ring_anything=False, ulysses_anything=False))} == {1}
    assert {split.ulysses for split in candidates(odd, pool(ulysses_anything=False))} == {1}


def test_a_model_that_all_ranks_hold_keeps_all_of_them_busy():
    splits = list(candidates(work(items=2), pool(shared=True)))
    assert {split.at_work for split in splits} == {1, 2, 4}
    assert all(split.ranks == (0, 1, 2, 3) for split in splits)
    assert {split.groups for split in splits if split.at_work == 1} == {4}


def test_a_unet_shares_its_items_only():
    splits = list(candidates(work(items=2, sequence=False), FAST))
    assert splits == [ALONE, CallSplit((0, 1), 2, 1, 1)]


def test_the_first_run_of_a_split_warms_up():
    known, split = Known(work(), all_ranks(FAST)), all_ranks(FAST)
    assert known.note(split, Run(9.0, 8.0, 1.0))
    assert known.choose(FAST, everywhere) == split
    assert known.note(split, Run(1.0, 0.9, 0.1))
    assert known.runs[split] == Run(1.0, 0.9, 0.1, 1)
    assert not known.note(split, Run(2.0, 1.9, 0.1))
    assert known.runs[split].seconds == pytest.approx(1.05)  # forgotten slowly


def test_a_split_that_ran_out_of_memory_is_not_taken_again():
    split, _, known = settled(work(1024), SLOW)
    assert split.at_work == 1
    assert known.alternative(SLOW, 1) is not None
    known.failed = frozenset({split})
    assert known.choose(SLOW, everywhere) != split
    assert known.alternative(SLOW, 1) is None  # the only one on one rank: nobody knows what it would take


@pytest.mark.parametrize(
    ("name", "told_apart"),
    [("context_latents", True), ("ref_contexts", True), ("vace_context", True), ("ref_mask_latents", True), ("x", True),
     ("context", False), ("attention_mask", False), ("clip_text_pooled", False), ("txt_byt5", False)],
)  # fmt: skip
def test_what_tells_kinds_of_calls_apart(name, told_apart):
    """Tokens of pictures, whatever they are called; not texts."""
    one, other = (CallKind.of("model", {"x": torch.zeros(1, 4), name: [torch.zeros(1, 4, size)]}) for size in (8, 16))
    assert (one.name != other.name, one.elements != other.elements) == (told_apart, told_apart)


def chooser(ranks, shortages=None, devices=(0, 1, 2, 3)):
    """(the chooser of a new pool, config)."""
    config = RuntimeConfig.resolve(inventory=DeviceInventory(type="cuda", count=8), devices=",".join(f"cuda:{n}" for n in devices))
    names = {"device_names": ["x"] * ranks.size, "backend": "nccl", "peer_to_peer": True, "world_size": ranks.size}
    return Chooser(SimpleNamespace(config=config, measured=ranks.measured, shares=(), **names), shortages or Shortages()), config


def replies(call, ranks, split, **machine):
    """What the ranks report of a call."""
    run = took(call, ranks, split, **machine)
    work = CallWork(call.items, call.sequence, call.attentions, call.operations)
    degrees = {"batch": split.batch, "ring": split.ring, "ulysses": split.ulysses}
    common = {"modules": call.modules, "nbytes": call.result, "work": work, "degrees": degrees}
    return [call_report(run.seconds, run.communication, idle=rank not in split.ranks, **common) for rank in range(ranks.size)]


def called(choose, config, call, ranks, size=64, **machine):
    """Have a call run as it is chosen; returns the choice and its split."""
    arguments = {"x": torch.zeros(call.items, 16, size, size)}
    chosen = choose.choose(config, CallKind.of(("model", "forward"), arguments), False, everywhere)
    split = chosen.split or all_ranks(ranks)
    choose.note(config, chosen, replies(call, ranks, split, **machine), False)
    return chosen, split


def test_the_pool_after_one_that_ran_out_of_memory_knows_the_split(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shortages, call = Shortages(), work(1024)
    first, config = chooser(SLOW, shortages)
    for _ in range(6):
        chosen, split = called(first, config, call, SLOW)
    assert split.at_work == 1
    first.failed(chosen)
    second, _ = chooser(SLOW, shortages)
    assert called(second, config, call, SLOW)[1].at_work > 1
    other, others = chooser(SLOW, shortages, devices=(4, 5, 6, 7))
    assert called(other, others, call, SLOW)[1] == split
    shortages.forget()  # what is kept on disk does not say it either
    assert called(chooser(SLOW, shortages)[0], config, call, SLOW)[1] == split


def test_what_ran_out_of_memory_is_forgotten_when_there_is_too_much_of_it():
    shortages = Shortages()
    for number in range(LIMIT + 1):
        shortages.note(("cuda:0",), f"model {number}", "whole")
        shortages.note(("cuda:0",), "model 0", "sharded")
    assert shortages.of(("cuda:0",), "model 0") == {"whole", "sharded"}
    assert shortages.of(("cuda:0",), "model 1") == set()
    assert shortages.of(("cuda:0",), f"model {LIMIT}") == {"whole"}


LOOPBACK = {"bandwidth": 1e9, "latency": 1e-4, "overlap": 0.0}
CPU = replace(GPU, flops=2e11, linear=2e11, **LOOPBACK)


@pytest.mark.parametrize("size", [2, 4])
def test_after_a_call_far_slower_than_one_device_should_take_the_next_runs_there(size):
    """A link that is two hundred times slower than it measured; also where two of four ranks should do better than one."""
    ranks, call = pool(size, rates=CPU), work(4352, parameters=3e8)
    expected, known = took(call, ranks, ALONE), Known(call, all_ranks(ranks))
    known.note(all_ranks(ranks), took(call, ranks, all_ranks(ranks), link=200.0))
    assert known.runs[all_ranks(ranks)].seconds > 3 * expected.seconds > 6
    assert known.choose(ranks, lambda part: part < 1) != ALONE  # for which there is no memory
    for _ in range(8):
        assert known.choose(ranks, everywhere) == ALONE
        known.note(ALONE, expected)


def test_a_first_run_that_makes_connections_is_not_held_against_its_split():
    known, split = Known(work(), all_ranks(FAST)), all_ranks(FAST)
    run = took(work(), FAST, split)
    assert run.seconds < 0.5
    known.note(split, replace(run, seconds=run.seconds + 1.5, communication=run.communication + 1.5))
    assert known.choose(FAST, everywhere) == split


def test_what_calls_show_about_the_link_goes_into_every_prediction():
    slow, call = replace(SLOW, link=10.0), work(16384)
    one, two = ALONE, CallSplit((0, 1), 1, 1, 2)
    alone = took(call, SLOW, one)
    told, untold = (predict(call, ranks, two, one, alone) for ranks in (slow, SLOW))
    communication = took(call, SLOW, two).communication
    assert told - untold == pytest.approx(9 * communication)
    run = took(call, SLOW, two, link=2.0)  # a call that has been sending knows it better
    assert predict(call, slow, all_ranks(SLOW), two, run) == pytest.approx(predict(call, SLOW, all_ranks(SLOW), two, run))


def test_weights_that_ranks_keep_parts_of_travel_in_every_call():
    """12 GB, half of which each of two 4090 has to send: what the device computes meanwhile hides it."""
    card = Rates(latency=3e-5, bandwidth=4e9, flops=1.2e14, memory=1e12, overlap=1.0, linear=1.2e14, launch=5e-6)
    ranks, call = pool(2, rates=card, shared=True), replace(work(4608), weights=6 << 30)
    one, two = CallSplit((0, 1), 1, 1, 1), CallSplit((0, 1), 1, 1, 2)
    seconds = call.weights / card.bandwidth
    plain = {split: took(replace(call, weights=0), ranks, split) for split in (one, two)}
    assert plain[two].compute < plain[one].compute < seconds
    runs = {}
    for split, run in plain.items():
        communication = run.communication + seconds - run.compute
        runs[split] = Run(run.compute + communication, run.compute, communication)
        assert link_of(call, ranks, split, runs[split]) == pytest.approx(1.0)
    assert predict(call, ranks, two, one, runs[one]) == pytest.approx(runs[two].seconds)
    assert predict(call, ranks, one, two, runs[two]) == pytest.approx(runs[one].seconds)
    slow = Run(2 * seconds, 2 * seconds, 0.0)  # hides all of it
    assert link_of(call, ranks, one, slow) is None
    assert predict(call, ranks, two, one, slow) == pytest.approx(seconds + plain[two].communication, rel=0.1)


def test_other_sizes_and_kinds_hear_what_one_call_showed_about_the_link(tmp_path, monkeypatch):
    """Its first call, on all ranks, took three times as long as one device would: no other one does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ranks = pool(2, rates=CPU)
    choose, config = chooser(ranks, devices=(0, 1))
    assert [called(choose, config, work(4352, parameters=3e8), ranks, 64, link=200.0)[1].at_work for _ in range(4)] == [2, 1, 1, 1]
    for size, tokens in ((48, 2448), (96, 9792), (64, 4352)):
        split = called(choose, config, work(tokens, parameters=3e8), ranks, size, link=200.0)[1]
        assert split.at_work == 1
    arguments = {"x": torch.zeros(1, 16, 32, 32)}
    small = choose.choose(config, CallKind.of(("model", "forward"), arguments), False, everywhere)
    assert small.split == split
    choose.failed(small)  # it does not fit there
    assert choose.choose(config, CallKind.of(("model", "forward"), arguments), False, everywhere).split is None


def test_what_is_said_about_a_choice_does_not_speak_against_it(tmp_path, monkeypatch):
    """A number of ranks that would take less is named where the next call has it, and nowhere else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ranks, call = pool(2, rates=CPU), work(4352, parameters=3e8)
    choose, config = chooser(ranks, devices=(0, 1))
    arguments, said = {"x": torch.zeros(1, 16, 64, 64)}, []
    for link in (200.0, 200.0, 1.0, 1.0, 1.0):
        chosen = choose.choose(config, CallKind.of(("model", "forward"), arguments), False, everywhere)
        split = chosen.split or all_ranks(ranks)
        told = choose.note(config, chosen, replies(call, ranks, split, link=link), False)
        said.append((split.at_work, told["alternative"], in_words(told)))
    for (_, other, words), (following, _, _) in pairwise(said):
        if other["ranks"] > 1 or not other["measured"]:  # what one device takes stands in the speed
            assert ("the next call takes" in words) == (other["times"] < 1 and following == other["ranks"])
        assert "would take 0." not in words
    assert said[0][2].startswith("2 of 2 devices; the next call takes 1 where memory allows: 0.")


def test_what_stays_inside_a_machine_is_not_counted_as_sent_between_two():
    """CFG on two machines with two devices each: halves go to machines, and each half's attention stays on one."""
    near, far = (1e-5, 2e10), (5e-4, 1e8)
    pairs = tuple(((i, j), near if i // 2 == j // 2 else far) for i in range(4) for j in range(i + 1, 4))
    rates = replace(machines.GPU, latency=1e-3, bandwidth=5e7, overlap=0.0)
    call = machines.work(items=2)
    inside, across = CallSplit((0, 1, 2, 3), 2, 1, 2), CallSplit((0, 1, 2, 3), 1, 1, 4)
    seconds = {}
    for names in ((), ("", "", "pc2", "pc2")):
        ranks = machines.pool(4, rates=rates, pairs=pairs)
        ranks = replace(ranks, measured=replace(ranks.measured, machines=names))
        alone = Run(10.0, 10.0, 0.0)
        seconds[names] = [predict(call, ranks, split, machines.ALONE, alone) for split in (inside, across)]
    one_level, two_levels = seconds.values()
    assert two_levels[0] < 10 / 3 < 10 < one_level[0]
    assert two_levels[1] == one_level[1] > 10
