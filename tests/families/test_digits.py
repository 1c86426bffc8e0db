"""What the small model that draws digits is trained as computes what ComfyUI's Flux computes with its file."""

from pathlib import Path

from support.ranks import COMFY, run_ranks

SCRIPT = Path(__file__).with_name("digits_ranks.py")


def test_the_network_for_training_equals_comfyuis():
    (found,) = run_ranks(SCRIPT, 1, timeout=120, preload=COMFY)
    assert found["difference"] < 1e-4 * found["spread"]
    assert found["spread"] > 0.1
