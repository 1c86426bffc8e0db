import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.devices import SlowDevice

from cp_runtime.engine.cost import AttentionShape, DegreePlanner, Rates, choose, cost
from cp_runtime.engine.measuring import CPU, Measured, measure, sustained_time
from cp_runtime.engine.ranks.collectives import CommStats
from cp_runtime.engine.ranks.config import SequenceSettings
from cp_runtime.engine.ranks.mesh import factors

FAST = Rates(latency=2e-5, bandwidth=2e11, flops=3e14, memory=3e12, overlap=1.0)  # NVLink and a big GPU
SLOW = replace(FAST, bandwidth=1e10)  # PCIe
SHAPE = AttentionShape(batch=1, queries=16384, keys=16384, heads=24, kv_heads=24, head_dim=128, itemsize=2)
SETTINGS = SequenceSettings()
GATHER, IN_ONE = SequenceSettings(rotate_method="allgather"), SequenceSettings(ulysses_rounds=1)


def whole(shape):
    """Bytes of q, of all ranks."""
    return shape.batch * shape.queries * shape.heads * shape.head_dim * shape.itemsize


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_are_those_of_the_formulas(ranks):
    assert cost(SHAPE, 1, ranks, SETTINGS, FAST).bytes_sent == pytest.approx(4 * (ranks - 1) / ranks**2 * whole(SHAPE))
    for method in ("alltoall", "allgather"):
        assert cost(SHAPE, ranks, 1, replace(SETTINGS, rotate_method=method), FAST).bytes_sent == pytest.approx(
            2 * (ranks - 1) / ranks * whole(SHAPE)
        )


@pytest.mark.parametrize(("ring", "ulysses", "expected"), [(2, 2, 1.0), (2, 4, 0.625)])
def test_bytes_of_unified(ring, ulysses, expected):
    assert cost(SHAPE, ring, ulysses, SETTINGS, FAST).bytes_sent == pytest.approx(expected * whole(SHAPE))


def test_grouped_heads_send_less():
    grouped = replace(SHAPE, kv_heads=6)
    assert cost(grouped, 4, 1, SETTINGS, FAST).bytes_sent == cost(SHAPE, 4, 1, SETTINGS, FAST).bytes_sent / 4
    assert cost(grouped, 1, 2, SETTINGS, FAST).bytes_sent == pytest.approx((2 + 2 / 4) / 4 * whole(SHAPE))


def test_factors():
    assert list(factors(6)) == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert list(factors(1)) == [(1, 1)]


EXACT_HEADS, EXACT_LENGTHS = replace(SETTINGS, ulysses_anything=False), replace(SETTINGS, ring_anything=False)
ODD = {"queries": 4097, "keys": 4097, "heads": 2, "kv_heads": 2}


@pytest.mark.parametrize(
    ("shape", "ranks", "settings", "rates", "degrees"),
    [
        ({"queries": 4096, "keys": 4096}, 8, SETTINGS, FAST, [(1, 8)]),  # a fast link, and heads that divide
        ({"heads": 2, "kv_heads": 2}, 4, SETTINGS, FAST, [(2, 2), (4, 1)]),  # heads run out
        ({"heads": 1, "kv_heads": 1}, 4, SETTINGS, FAST, [(4, 1)]),
        ({}, 2, IN_ONE, SLOW, [(2, 1)]),  # a slow link hides behind long attention
        ({}, 2, SETTINGS, SLOW, [(1, 2)]),  # more of it in rounds: there all heads but the first travel beside it
        ({}, 2, SETTINGS, replace(SLOW, overlap=0.0), [(1, 2)]),
        ({"heads": 6, "kv_heads": 6}, 4, EXACT_HEADS, FAST, [(4, 1), (2, 2)]),  # what must divide is kept to
        (ODD, 4, EXACT_LENGTHS, FAST, [(1, 4)]),
        (ODD, 4, EXACT_HEADS, FAST, [(4, 1)]),
    ],
)
def test_degrees_are_chosen(shape, ranks, settings, rates, degrees):
    assert choose(replace(SHAPE, **shape), ranks, settings, rates) in degrees


@pytest.mark.parametrize(
    ("shape", "rates", "rounds"),
    [
        ({}, SLOW, 8),  # the exchange takes twice as long as attention
        ({}, replace(FAST, bandwidth=1e11), 4),
        ({}, replace(FAST, bandwidth=8e11), 1),  # a few hundredths of it
        ({"queries": 4096, "keys": 4096}, replace(FAST, launch=5e-6), 1),
        ({}, replace(SLOW, overlap=0.0), 1),  # what does not hide only adds latency
        ({"queries": 1024, "keys": 1024}, replace(SLOW, latency=1e-3), 1),
        ({"queries": 4608, "keys": 4608}, replace(SLOW, launch=5e-6), 2),  # a round is as long as the launches of one
        ({"heads": 4, "kv_heads": 4}, SLOW, 2),  # each rank has two
        ({"heads": 8, "kv_heads": 8}, replace(SLOW, bandwidth=SLOW.bandwidth / 3, overlap=0.5), 4),  # most cannot be hidden
        ({"queries": 2048, "keys": 2048, "heads": 16, "kv_heads": 16}, replace(SLOW, bandwidth=4e10, units=128), 1),  # one wave
    ],
)
def test_rounds_are_chosen(shape, rates, rounds):
    """And by all ranks alike; the config obeys what is set."""
    planner = DegreePlanner(replace(SETTINGS, ring_degree=1, ulysses_degree=2), 2, rates)
    assert planner(replace(SHAPE, **shape)).ulysses_rounds == rounds
    set_ = DegreePlanner(replace(SETTINGS, ring_degree=1, ulysses_degree=2, ulysses_rounds=3), 2, rates)
    assert set_(replace(SHAPE, **shape)).ulysses_rounds == 3


def test_repeated_heads_are_counted():
    one, all_of_them = (cost(replace(SHAPE, heads=8, kv_heads=n), 1, 4, SETTINGS, FAST) for n in (1, 8))
    assert one.compute == all_of_them.compute


def test_the_planner_adds_up_and_obeys():
    planner = DegreePlanner(replace(SETTINGS, ring_degree=2, ulysses_degree=2), 4, FAST)
    config = planner(SHAPE)
    assert config.mesh_shape == planner.chosen == (2, 2)
    assert (config.rotate_method, config.ulysses_anything) == ("alltoall", True)
    planner(SHAPE)
    expected = cost(SHAPE, 2, 2, SETTINGS, FAST)
    assert (planner.bytes_sent, planner.seconds) == (2 * expected.bytes_sent, 2 * expected.communication)
    free = DegreePlanner(SETTINGS, 4, FAST)
    assert free(SHAPE).mesh_shape == choose(SHAPE, 4, SETTINGS, FAST)


@pytest.mark.parametrize(("beside", "overlap"), [(False, 0.0), (True, 1.0)])
def test_rates_of_a_device_are_timed_by_it(monkeypatch, beside, overlap):
    """Not at idle clocks. The launch of a collective is no part of it. `beside`: messages have a stream of their own."""
    device, began = SlowDevice(), []

    def work(seconds):
        began.append(time.perf_counter())
        idle = began[-1] - began[0] < 0.2  # its clocks take a while to rise
        device.work(seconds * 5 if idle else seconds)

    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: work(0.005))
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda *_: work(0.001))
    monkeypatch.setattr("cp_runtime.engine.measuring.scaled_dot_product_attention", lambda *_: work(0.002))

    def all_to_all(*_):
        time.sleep(0.005)
        arrives = max(device.done, time.perf_counter()) + 0.001
        if not beside:
            work(0.001)
        return SimpleNamespace(wait=lambda: setattr(device, "done", max(device.done, arrives)))

    gathered = lambda tensors, lengths, dim: [tensors[0].expand(2, -1)]  # noqa: E731
    whole = SimpleNamespace(all_to_all=all_to_all, via_host=True, rank=0, size=2, all_gather=gathered, largest=lambda own: own)
    rates = measure(SimpleNamespace(whole=whole, size=2, stats=CommStats()), torch.device("meta")).each[1]
    assert rates.latency == pytest.approx(0.001)
    assert rates.flops == pytest.approx(4 * 4 * 4096**2 * 128 / 0.002)
    assert rates.linear == pytest.approx(2 * 4096**3 / 0.001)
    assert rates.overlap == pytest.approx(overlap, abs=0.1)


def test_a_link_is_measured_beyond_a_burst():
    """Some sends are fast, the next ones slow and about equal. A rank that is late once is no slower link."""
    assert sustained_time([0.01, 0.011, 0.05]) == (0.05, True)
    assert sustained_time([0.01, 0.011, 0.05, 0.01, 0.011, 0.01]) == (0.01, False)
    assert sustained_time([0.01, 0.011, 0.5, 0.4, 0.45, 0.5]) == (0.4, False)


def machine(*speeds, devices=(), machines=(), inside=(), **link):
    """What ranks of these speeds measured."""
    each = tuple(replace(FAST, flops=FAST.flops * speed, linear=FAST.flops * speed, **link) for speed in speeds)
    return Measured(each, devices or tuple(range(len(speeds))), machines, inside, (speeds,))


@pytest.mark.parametrize(
    ("speeds", "devices", "shares"),
    [
        ((2.0, 1.0), (), (8, 4)),
        ((1.0, 1.9), (), (4, 8)),  # to a quarter of the slowest
        ((1.0, 1.95), (), (4, 8)),
        ((3.0, 1.0), (7, 7), ()),  # of one name: one was busy when it was measured
        ((1.5, 1.0), (7, 7), (6, 4)),  # one has a power limit
        ((1.2, 1.0), (7, 7), (5, 4)),
        ((1.1, 1.0), (7, 7), ()),
        ((1.5, 1.0), (CPU, CPU), ()),
        ((1.0, 1.09), (), ()),
        ((1.0, 1.0, 1.5, 3.1), (), (4, 4, 6, 12)),
    ],
)
def test_measured_shares(speeds, devices, shares):
    assert machine(*speeds, devices=devices).shares == shares


def test_shares_need_a_difference_in_every_measurement():
    """Another program was at work beside one of them; the next two show equal devices."""
    once = replace(machine(1.0, 1.5, devices=(7, 7)), speeds=((1.0, 1.5), (1.0, 1.02), (1.01, 1.0)))
    assert once.shares == ()
    assert replace(once, speeds=((1.0, 1.5), (1.0, 1.2), (1.0, 1.25))).shares == (4, 5)


def test_groups_that_stay_on_one_machine_have_the_link_inside():
    inside = ((1e-5, 4e10), (2e-5, 4e10), (1e-5, 3e10), (1e-5, 3e10))
    four = machine(1, 1, 1, 2, machines=("", "", "pc2", "pc2"), inside=inside, latency=6e-5, bandwidth=2.5e9)
    link = lambda *groups: (four.of(*groups).latency, four.of(*groups).bandwidth)  # noqa: E731
    assert link((0, 1)) == (2e-5, 4e10)
    assert link((0, 1), (2, 3)) == (2e-5, 3e10)  # of the slower ones
    assert link((0, 2), (1, 3)) == link(range(4)) == (6e-5, 2.5e9)
    assert four.of((2, 3)).flops == 1.5 * FAST.flops
    one = machine(1, 1, latency=6e-5, bandwidth=2.5e9)
    assert (one.of((0, 1)).latency, one.of((0,)).bandwidth) == (6e-5, 2.5e9)


def test_uneven_shares_cost_what_the_slowest_rank_takes():
    even, uneven = (cost(SHAPE, 2, 1, GATHER, FAST, shares) for shares in ((), (2, 1)))
    # Each has tokens in proportion to its speed: as long as two ranks of the mean speed.
    assert uneven.compute == pytest.approx(even.compute)
    assert uneven.bytes_sent == pytest.approx(4 / 3 * even.bytes_sent)
    # Heads are whole: both for the rank that is three times as fast.
    two = replace(SHAPE, heads=2, kv_heads=2)
    assert cost(two, 1, 2, GATHER, FAST, (3, 1)).compute == pytest.approx(4 / 3 * cost(two, 1, 2, GATHER, FAST).compute)
    assert choose(two, 2, SETTINGS, FAST, (3, 1)) == (2, 1)
    assert cost(SHAPE, 1, 2, GATHER, FAST, (2, 1)).compute == pytest.approx(cost(SHAPE, 1, 2, GATHER, FAST).compute)
