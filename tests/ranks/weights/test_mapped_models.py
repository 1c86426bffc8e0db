"""A model whose weights never fill a rank's memory: mapped from a file, and shared out block by block."""

import pytest
from support.ranks import run_ranks

SCRIPT = "weights/mapped_ranks.py"
RANKS = 2
ALLOWANCE = 16e6  # bytes; the first use of a process group and of a matrix product takes 6 to 7 MB
MARGIN = 1.1


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    (report,) = run_ranks(SCRIPT, RANKS, str(tmp_path_factory.mktemp("model") / "model.safetensors"))
    return report


@pytest.mark.bits("the same shares of tokens, with whole weights or parts")
def test_memory_of_ranks_that_load_a_model_and_call_it(found):
    blocks, block, rest = found["blocks"], found["largest"], found["rest"]
    assert found["equal"] == [True, True]
    assert found["nothing"] < ALLOWANCE
    bound = MARGIN * (blocks / RANKS + block + rest) + ALLOWANCE
    assert found["loading"] < bound
    assert found["read"] > blocks > bound  # what it takes to hold the model, and that it would be seen
    # Two blocks are there at a time. gloo receives each into memory of its own first, which malloc does not give back at once; NCCL
    # needs none.
    assert found["calling"] < MARGIN * 3 * 2 * block + ALLOWANCE < blocks


def test_ranks_without_memory_for_their_part(found):
    """They say so; the model is no longer whole, and can be loaded again."""
    assert "allocate memory" in found["error"]
    assert 0 < found["lost"] < found["weights"]
    assert found["after_error"]
