"""YuE2: songs of one chunk, and of several."""

from typing import Any

from . import Case, Model, Served, denoise

KEPT = 2 * 2 * 32  # keys and values of two layers with one head
MODELS = {"yue2": Model("comfy.ldm.yue2.model.YuE2", {}, "YuE2", since="0.36.0")}


def song(batch: int = 1, *chunks: tuple[int, int]) -> dict[str, Any]:
    """Chunks of (frames, tokens of their prefix)."""
    found, end, kv_end = [], 0, 0
    for frames, past in chunks:
        found.append((end, end + frames, kv_end, kv_end + past))
        end, kv_end = end + frames, kv_end + past
    return denoise(batch, (64, end), kv_end, KEPT, yue2_chunks=found)


CASES = [
    Case("yue2", "yue2", lambda: song(1, (17, 9))),
    Case("yue2 odd batch 2", "yue2", lambda: song(2, (13, 5))),
    Case("yue2 one token before it", "yue2", lambda: song(1, (9, 1))),
    Case("yue2 two chunks", "yue2", lambda: song(1, (17, 9), (8, 12))),
    Case("yue2 three chunks batch 2", "yue2", lambda: song(2, (7, 9), (7, 9), (5, 3))),
    Case("yue2 a short chunk", "yue2", lambda: song(1, (12, 6), (1, 7))),
]
SERVED: list[Served] = []  # until it was tried on a ComfyUI that has it
