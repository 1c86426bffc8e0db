"""How many ranks a call deserves: the rule, on machines that take as long as the tables say."""

import pytest

from cp_runtime.controller.placement import SHORTAGES_KEPT, Shortages
from cp_runtime.engine.ranks.config import SequenceSettings
from cp_runtime.timing.choice import Chooser, Ranks
from cp_runtime.timing.times import Times
from cp_runtime.words import words_in


@pytest.fixture
def times(tmp_path):
    return Times(tmp_path / "times.json")


def ranks_of(size, most=0, shares=(), sharded=False):
    return Ranks(size, most or size, shares, SequenceSettings(), sharded=sharded)


class Calls:
    """Calls of one kind on the ranks of a pool, which has just started. `own`: of them on this computer; 0 = all."""

    def __init__(self, times, ranks, own=0):
        self.times, self.ranks, self.chooser = times, ranks, Chooser(times, "a machine", "a device", own or ranks.size)

    def note(self, count, seconds):
        self.times.add("flux", self.chooser.who(self.ranks, count), seconds)
        self.chooser.note("flux", self.ranks, count)

    def run(self, seconds, calls=1, can=lambda count: True):
        """Run calls as they are chosen. `seconds`: of one, by number of ranks; pairs where the first takes longer.

        Returns the numbers of ranks."""
        counts = []
        for _ in range(calls):
            count = self.chooser.choose("flux", self.ranks, can)
            given = seconds[count]
            first, later = given if isinstance(given, tuple) else (given, given)
            self.note(count, later if count in counts else first)
            counts.append(count)
        return counts

    def described(self, count):
        return self.chooser.described("flux", self.ranks, count)


@pytest.mark.parametrize(
    ("size", "seconds", "counts"),
    [
        pytest.param(4, {4: 5.0}, [4] * 6, id="a long call is never tried on one"),
        pytest.param(4, {4: 0.3, 1: 0.9}, [4, 1, 4, 4, 4, 4], id="one is hopeless"),
        pytest.param(4, {4: 0.6, 1: 0.7}, [4, 1, 4, 1, 4, 4], id="one is nearly as fast"),
        pytest.param(4, {4: 0.03, 1: 0.01}, [4, 1, 4, 1, 1, 1], id="tiny calls"),
        pytest.param(2, {2: 0.5, 1: 0.4}, [2, 1, 2, 1, 1, 1], id="the second device is slow"),
        pytest.param(4, {4: (3.0, 0.4), 1: 0.9}, [4, 4, 1, 4, 4, 4], id="the first run warms up"),
        pytest.param(4, {4: (0.9, 0.2), 1: 0.4}, [4, 1, 4, 4, 4, 4], id="so does that of a short call"),
        pytest.param(1, {1: 5.0}, [1, 1, 1], id="there is one only"),
    ],
)
def test_on_one_computer(size, seconds, counts, times):
    assert Calls(times, ranks_of(size)).run(seconds, len(counts)) == counts


@pytest.mark.parametrize(
    ("size", "own", "seconds", "counts"),
    [
        pytest.param(3, 2, {3: 20.0, 2: 3.0}, [3, 2, 2, 2, 2], id="a slow link is left after one call"),
        pytest.param(2, 1, {2: 20.0, 1: 9.0}, [2, 1, 1, 1, 1], id="where one rank is here, too"),
        pytest.param(4, 2, {4: 2.0, 2: 3.5}, [4, 2, 4, 2, 4, 4], id="a fast link stays"),
        pytest.param(4, 2, {4: (3.5, 1.1), 2: 1.5}, [4, 2, 4, 2, 4, 4], id="connections are not held against it"),
        pytest.param(3, 2, {3: 4.0, 2: 0.5, 1: 0.2}, [3, 2, 1, 1, 1, 1], id="tiny calls"),
        pytest.param(3, 2, {3: 0.2, 2: 2.0, 1: 3.0}, [3, 2, 1, 3, 3, 3], id="the best so far says that a call is short"),
    ],
)
def test_on_several_computers(size, own, seconds, counts, times):
    assert Calls(times, ranks_of(size), own).run(seconds, len(counts)) == counts


def test_the_candidates(times):
    chooser = Calls(times, ranks_of(6), own=4).chooser
    assert chooser.candidates(ranks_of(6)) == [1, 4, 6]
    assert chooser.candidates(ranks_of(6, most=2)) == [1, 2]
    assert chooser.candidates(ranks_of(6, sharded=True)) == [1, 6]
    assert Calls(times, ranks_of(4)).chooser.candidates(ranks_of(4)) == [1, 4]


def test_with_sharded_weights_all_take_part_or_compute_the_same(times, tmp_path):
    ranks = ranks_of(4, sharded=True)
    assert Calls(times, ranks, own=2).run({4: 5.0}, 4) == [4] * 4
    assert Calls(Times(tmp_path / "others.json"), ranks, own=2).run({4: 0.5, 1: 0.2}, 5) == [4, 1, 4, 1, 1]


def test_what_does_not_fit_is_no_candidate(times, tmp_path):
    made = Calls(times, ranks_of(3), own=2)
    assert made.run({3: 0.4}, 3, can=lambda count: count > 2) == [3] * 3
    assert made.run({2: 0.3, 1: 0.2}, 5) == [2, 1, 2, 1, 1]
    assert made.run({3: 0.4}, can=lambda count: count > 2) == [3]  # whatever was measured
    assert Calls(Times(tmp_path / "others.json"), ranks_of(4, most=2)).run({2: 5.0}, 3) == [2] * 3
    assert {count: ranks_of(2, shares=(3, 1)).largest_part(count) for count in (1, 2)} == {1: 1.0, 2: 0.75}
    assert ranks_of(4).largest_part(2) == 0.5


@pytest.mark.parametrize(("seconds", "count"), [(9.0, 4), (0.1, 1)])
def test_a_call_that_was_repeated_on_one_device_needs_no_second_time(seconds, count, times):
    made = Calls(times, ranks_of(4))
    made.run({4: 5.0}, 3)
    times.add("flux", made.chooser.who(made.ranks, 1), seconds)
    made.chooser.compared("flux", made.ranks)
    assert made.run({count: seconds}) == [count]


def test_one_late_call_does_not_matter_and_a_machine_that_became_slower_does(times):
    made = Calls(times, ranks_of(4))
    for seconds in (9.0, 1.0, 5.0, 1.1):
        made.note(4, seconds)
    made.note(1, 2.0)
    assert made.described(4)["seconds"] == 1.0
    for _ in range(3):
        made.note(4, 5.0)
    assert made.described(4)["seconds"] == 5.0


def test_times_are_kept_and_one_alone_is_not_held_against_all_ranks_at_the_next_start(times):
    """It may have been slow by chance; the second time, it was not."""
    seconds = {3: 20.0, 2: 3.0}
    starts = [Calls(times, ranks_of(3), own=2).run(seconds, 3) for _ in range(3)]
    assert starts == [[3, 2, 2], [3, 2, 2], [2, 2, 2]]


def test_what_is_said_about_a_choice(times):
    """Of what was measured. A number of ranks that would take less is not named: the calls to come take it, where memory allows."""
    made, said = Calls(times, ranks_of(3), own=2), []
    for _ in range(3):
        (count,) = made.run({3: 20.0, 2: 4.0})
        said.append(words_in("en").choice(made.described(count)))
    assert said == ["3 of 3 devices", *["2 of 3 devices; 3 would take 5.00 times as long (measured)"] * 2]
    assert made.described(2)["alternative"] == {"ranks": 3, "seconds": 20.0, "times": 5.0}
    assert made.described(1) == {"ranks": 1, "of": 3, "alternative": None}
    assert words_in("en").choice(None) == ""


def test_what_ran_out_of_memory_is_forgotten_when_there_is_too_much_of_it():
    shortages = Shortages()
    for number in range(SHORTAGES_KEPT + 1):
        shortages.note(("cuda:0",), f"model {number}", "whole")
        shortages.note(("cuda:0",), "model 0", "sharded")
    assert shortages.of(("cuda:0",), "model 0") == {"whole", "sharded"}
    assert shortages.of(("cuda:0",), "model 1") == set()
    assert shortages.of(("cuda:0",), f"model {SHORTAGES_KEPT}") == {"whole"}
