"""The speed-up to expect of some devices before a model has run on them: an estimate, for a usual card and a usual link."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ..engine.cost import AttentionShape, CallWork, Rates
from ..engine.measuring import Measured
from ..engine.ranks.config import SequenceSettings
from .prediction import Ranks, Way, on_one_rank, predict

DIRECT, INDIRECT = 18e9, 10e9
"""Bytes per second that each of a few cards sends, on PCIe 4 with 16 lanes: with peer access, and through the host's memory."""
ALONE = 3  # cards that do not share the way through the host, as in benchmarks/forecast.py
FLOPS, MEMORY = 1.2e14, 1e12  # operations and bytes per second that a model gets out of an RTX 4090
LAUNCH = 1e-3  # seconds of the host per block


def _work(items: int, parameters: float, blocks: int, heads: int, tokens: int) -> CallWork:
    return CallWork(items, True, ((AttentionShape(1, tokens, tokens, heads, heads, 128, 2), blocks),), 2 * parameters * tokens)


PICTURE = _work(1, 12e9, 57, 24, 4096 + 512)  # Flux, 1024 x 1024
VIDEO = _work(1, 14e9, 40, 40, 32760)  # Wan 2.2 14B, 480p, 81 frames, without CFG


@cache
def expected(devices: int, direct: bool) -> tuple[float, float]:
    """Return the speed-ups over one device of a picture and of a long video. `direct`: devices reach each other's memory."""
    link = (DIRECT if direct else INDIRECT) * min(1.0, ALONE / devices)
    rates = Rates(3e-5, link, FLOPS, MEMORY, 1.0, FLOPS, units=128)
    ranks = Ranks(Measured((rates,) * devices, (0,) * devices), (), SequenceSettings(ulysses_rounds=1))  # nothing hidden

    def times(work: CallWork) -> float:
        ((_, blocks),) = work.attentions
        alone = replace(on_one_rank(work, ranks), host=LAUNCH * blocks)
        return max(alone.seconds / predict(work, ranks, ranks.way(work, count), Way(1), alone) for count in range(1, devices + 1))

    return times(PICTURE), times(VIDEO)
