"""How long planned modules take, from the counts that ranks keep."""

from cp_runtime.pool.collection import SUSPENDED, ModuleTimes


def watched(*looks):
    """What is known after looking at (time, modules by rank)."""
    times = ModuleTimes()
    for now, counts in looks:
        times.note(dict(enumerate(counts)), 100 + now)
    return times.longest


def test_the_longest_time_between_two_modules_counts():
    assert watched((0, [0, 0]), (0.5, [1, 1]), (1, [1, 2]), (1.5, [2, 2]), (2, [3, 3])) == 1.0


def test_what_comes_before_the_first_module_does_not_count():
    """Weights that move to the device, for instance."""
    assert watched(*((t, [0]) for t in range(60)), (60, [5])) == 0


def test_a_module_that_does_not_end_does_not_count():
    assert watched((0, [1]), (0.5, [2]), *((t, [2]) for t in range(1, 60))) == 0.5


def test_time_in_which_this_process_was_suspended_does_not_count():
    assert watched((0, [1]), (SUSPENDED + 1, [2]), (SUSPENDED + 1.5, [3])) == 0.5
