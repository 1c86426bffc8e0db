"""A model whose weights never fill a rank's memory: mapped from a file, and shared out block by block."""

from pathlib import Path

from support.ranks import run_ranks

SCRIPT = Path(__file__).with_name("mapped_ranks.py")
RANKS = 2
ALLOWANCE = 16e6  # bytes; the first use of a process group and of a matrix product takes 6 to 7 MB
MARGIN = 1.1


def test_memory_of_ranks_that_load_a_model_and_call_it(tmp_path):
    (found,) = run_ranks(SCRIPT, RANKS, str(tmp_path / "model.safetensors"))
    blocks, block, rest = found["blocks"], found["largest"], found["rest"]
    assert found["equal"] == [True, True]
    assert found["nothing"] < ALLOWANCE
    bound = MARGIN * (blocks / RANKS + block + rest) + ALLOWANCE
    assert found["loading"] < bound
    assert found["read"] > blocks > bound  # what it takes to hold the model, and that it would be seen
    # Two blocks are there at a time, and gloo receives each into memory of its own first. NCCL does not.
    assert found["calling"] < MARGIN * 2 * 2 * block + ALLOWANCE
