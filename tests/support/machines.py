"""Made-up machines, and what calls would take on them: for the choice of ranks, without any."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cp_runtime.engine.config import SequenceSettings
from cp_runtime.engine.cost import AttentionShape, Rates, cost
from cp_runtime.engine.measuring import Measured
from cp_runtime.engine.policy import CallSplit, CallWork, Pool, Run, predict

GPU = Rates(latency=2e-5, bandwidth=2e11, flops=3e14, memory=3e12, overlap=1.0, linear=4e14, launch=5e-6)
SLOW_LINK: Any = {"bandwidth": 5e8, "latency": 2e-4, "overlap": 0.0}
ALONE = CallSplit((0,), 1, 1, 1)


def pool(
    ranks: int = 4,
    speeds: Sequence[float] = (),
    shares: tuple[int, ...] = (),
    shared: bool = False,
    rates: Rates = GPU,
    pairs: Any = (),
    **settings: Any,
) -> Pool:
    """Ranks of some speeds, relative to `rates`; `settings` are those of the sequence."""
    speeds = speeds or [1.0] * ranks
    each = tuple(replace(rates, flops=rates.flops * speed, linear=rates.linear * speed) for speed in speeds)
    return Pool(Measured(each, pairs, tuple(range(len(speeds)))), shares, SequenceSettings(**settings), shared)


def work(
    tokens: int = 4608, items: int = 1, heads: int = 24, layers: int = 57, parameters: float = 12e9, sequence: bool = True
) -> CallWork:
    shape = AttentionShape(1, tokens, tokens, heads, heads, 128, 2)
    attentions = ((shape, layers),) if sequence else ()
    return CallWork(items, sequence, attentions, 2 * parameters * tokens, layers, 1 << 20)


def took(call: CallWork, ranks: Pool, split: CallSplit, noise: Callable[[], float] = lambda: 1.0, link: float = 1.0) -> Run:
    """What a call takes on a split, by the machine of `ranks`: what runs in place of a GPU."""
    rates = ranks.measured.each[0]
    attention = sum(count * cost(shape, 1, 1, ranks.settings, rates).compute for shape, count in call.attentions)
    alone = Run(1.0, call.items * (call.operations / rates.linear + attention), 0.0)
    total = predict(call, ranks, split, ALONE, alone) * noise()
    communication = 0.0 if split.at_work == 1 else total - predict(call, _endless(ranks), split, ALONE, alone)
    return Run(total + (link - 1) * communication, total - communication, link * communication)


def _endless(ranks: Pool) -> Pool:
    """The same without a link to speak of."""
    each = tuple(replace(rates, latency=0.0, bandwidth=float("inf")) for rates in ranks.measured.each)
    return replace(ranks, measured=replace(ranks.measured, each=each, pairs=()))


def everywhere(part: float) -> bool:
    """Whether a part of the weights fits: wherever it is."""
    return True


def all_ranks(ranks: Pool) -> CallSplit:
    return CallSplit(tuple(range(ranks.size)), 1, 1, ranks.size)


FAST = pool()
SLOW = pool(rates=replace(GPU, **SLOW_LINK))
