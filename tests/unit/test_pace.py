"""How often ranks look for Cancel."""

from cp_runtime.controller.calls import KINDS, Pace


def test_kinds_of_calls_that_alternate_keep_their_pace():
    """CFG halves of two lengths of text, and decodes in between."""
    pace = Pace()
    assert pace.modules_per_check("positive", 2) == 1  # nobody knows how long it takes
    for _ in range(3):
        pace.note("positive", 2, 2.0, 40)
        pace.note("negative", 2, 0.4, 40)
        pace.note("decode", 2, 5.0, 20)
    assert [pace.modules_per_check(kind, 2) for kind in ("positive", "negative", "decode")] == [2, 0, 1]


def test_fewer_ranks_take_longer():
    pace = Pace()
    pace.note("call", 4, 0.4, 40)
    assert (pace.modules_per_check("call", 4), pace.modules_per_check("call", 1)) == (0, 3)


def test_the_oldest_kind_is_forgotten():
    pace = Pace()
    for kind in range(KINDS + 1):
        pace.note(kind, 2, 0.1, 40)
        pace.note(0, 2, 0.1, 40)
    assert [pace.modules_per_check(kind, 2) for kind in (0, 1, 2, KINDS)] == [0, 1, 0, 0]
