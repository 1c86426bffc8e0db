"""What attentions keep for the next ones of their shapes."""

from support.ranks import run_ranks


def test_a_plan_is_used_for_its_own_shapes_alone_and_keeps_no_tensor():
    (found,) = run_ranks("attention/plan_ranks.py", 2)
    assert found["worst"] < 1e-5
    assert not found["differs"]
    assert found["alive"] == 0
    assert found["kept"] > 2 >= found["later"]
    assert found["ran"] == [0, 0, found["world"], found["world"]]  # a kernel runs on all ranks or on none
