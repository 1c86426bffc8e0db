"""Made-up machines, and what calls would take on them: for the choice of ranks, without any."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cp_runtime.engine.cost import AttentionShape, CallWork, Rates
from cp_runtime.engine.measuring import Measured
from cp_runtime.engine.ranks.config import SequenceSettings
from cp_runtime.timing.choice import Chooser
from cp_runtime.timing.prediction import Ranks, Run, on_one_rank, predict
from cp_runtime.timing.times import Times

GPU = Rates(latency=2e-5, bandwidth=2e11, flops=3e14, memory=3e12, overlap=1.0, linear=4e14, launch=5e-6)
SLOW_LINK: Any = {"bandwidth": 5e8, "latency": 2e-4, "overlap": 0.0}


def ranks_of(
    ranks: int = 4,
    speeds: Sequence[float] = (),
    shares: tuple[int, ...] = (),
    sharded: bool = False,
    rates: Rates = GPU,
    inside: tuple[float, float] | None = None,
    own: int = 0,
    **settings: Any,
) -> Ranks:
    """Ranks of some speeds, relative to `rates`.

    Args:
        inside: latency and bandwidth inside of a machine, where `own` ranks are on this one and the others on another.
        settings: of the sequence.
    """
    speeds = speeds or [1.0] * ranks
    each = tuple(replace(rates, flops=rates.flops * speed, linear=rates.linear * speed) for speed in speeds)
    machines = ("",) * own + ("pc2",) * (len(speeds) - own) if own else ()
    links = (inside,) * len(speeds) if inside else ()
    return Ranks(Measured(each, tuple(range(len(speeds))), machines, links), shares, SequenceSettings(**settings), sharded=sharded)


def work(
    tokens: int = 4608, items: int = 1, heads: int = 24, layers: int = 57, parameters: float = 12e9, sequence: bool = True
) -> CallWork:
    shape = AttentionShape(1, tokens, tokens, heads, heads, 128, 2)
    attentions = ((shape, layers),) if sequence else ()
    return CallWork(items, sequence, attentions, 2 * parameters * tokens, 1 << 20)


def took(call: CallWork, ranks: Ranks, count: int, noise: Callable[[], float] = lambda: 1.0, link: float = 1.0) -> Run:
    """What a call takes on so many ranks, by the machine of `ranks`: what runs in place of a GPU."""

    def seconds(of: Ranks) -> float:
        return predict(call, of, of.way(call, count), of.way(call, 1), on_one_rank(call, of))

    total = seconds(ranks) * noise()
    communication = 0.0 if count == 1 else total - seconds(_endless(ranks))
    return Run(total + (link - 1) * communication, total - communication, link * communication)


def _endless(ranks: Ranks) -> Ranks:
    """The same without a link to speak of."""
    each = tuple(replace(rates, latency=0.0, bandwidth=float("inf")) for rates in ranks.measured.each)
    return replace(ranks, measured=replace(ranks.measured, each=each, inside=()))


def everywhere(count: int) -> bool:
    """Whether so many ranks have the memory: however many."""
    return True


class Calls:
    """Calls of one kind, run as they are chosen, on a made-up machine."""

    def __init__(self, ranks: Ranks, times: Times, own: int = 0) -> None:
        self.ranks, self.times = ranks, times
        self.chooser = Chooser(times, "a machine", "a device", own or ranks.size)

    def run(
        self,
        call: CallWork,
        kind: str = "flux",
        can: Callable[[int], bool] = everywhere,
        guess: CallWork | None = None,
        **machine: Any,
    ) -> tuple[int, float]:
        """(number of ranks, seconds) of the next call. `machine`: see `took`."""
        count = self.chooser.choose(kind, self.ranks, can, guess)
        return count, self.note(call, count, took(call, self.ranks, count, **machine), kind, guess)

    def note(self, call: CallWork, count: int, run: Run, kind: str = "flux", guess: CallWork | None = None) -> float:
        """Note a run; returns its seconds."""
        self.times.add(kind, self.chooser.who(self.ranks, count), run.seconds)
        tokens = call.attentions[0][0].queries if call.attentions else 0
        known = replace(call, attentions=()) if count == 1 else call  # one rank does not say what it would send
        self.chooser.note(kind, self.ranks, count, known, run, tokens, guess)
        return run.seconds


FAST = ranks_of()
SLOW = ranks_of(rates=replace(GPU, **SLOW_LINK))
