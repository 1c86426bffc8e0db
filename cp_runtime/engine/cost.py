"""Cost of one context-parallel attention for every (ring, ulysses), and the choice between them.

The model, for P ranks as ring R x ulysses U, S queries and S_k keys, H query and K key/value heads of D elements of b bytes, batch
B, on a link with latency a and bandwidth w, attention at f operations per second and memory at m bytes per second. Rank r has the
part l of the tokens, its chunk of the ring the part c, and it gets the part h of the heads (`split_sizes`, by shares); with equal
shares and heads that divide, l = 1 / P, c = 1 / R, h = 1 / U. The rank with most counts:

| term | formula |
|---|---|
| bytes sent by Ulysses | `B D b (l (1 - h) (S H + 2 S_k K) + (c - l) h S H)` (q, k, v, then the output) |
| bytes sent by the ring | `(1 - c) * 2 S_k B D b K h`, c of the smallest chunk |
| attention of one rank | `t = 4 B S S_k D H h c / f` |
| Ulysses in C rounds | `s + (C - 1) * max(0, s - overlap * t / C)`, s = `2 a + bytes / (C w)`: the part not hidden by attention |
| more rounds | `(C - 1) * launch * ROUND_LAUNCHES`, and t in waves of `units` tiles, of which a round's last may be partly empty |
| ring alltoall | `(R - 1) * max(0, a + bytes of the largest chunk / w - overlap * t / R)`: the part not hidden by a step |
| ring allgather | `a + bytes / w` |
| merging | `(R - 1) * 4 * B S D H h c * 4 / m`: the output is read and written in float32 for every further chunk |

Shares are taken for the speeds of ranks: f and m of a rank are those of the mean rank times its share over the mean share. The
choice has the least sum of attention, communication and merging; where two are equal, the higher Ulysses degree. Of the rounds in
`ROUNDS`, the fewest are taken whose waiting is at most `ROUNDS_TOLERANCE` of attention more than the least; beside a ring, one.
`a`, `w`, `f` and `m` are measured on the ranks when they start (`measure`) and shared, so every rank chooses alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from .attention.eight_bits import SCALE
from .attention.ulysses import repeats
from .ranks.config import EXACT, ContextParallelConfig, SequenceSettings
from .ranks.mesh import factors
from .ranks.sharding import Shares, split_sizes

# Where exchange and attention take equally long, four rounds take 0.64 of the time of one: docs/performance.md, "Slow links".
ROUNDS = (1, 2, 4, 8)
ROUND_LAUNCHES = 12  # operations per round: packing, two collectives, attention, unpacking
ROUNDS_TOLERANCE = 0.03  # of attention: accepted excess over the best number of rounds
TILE = 128  # queries of one head


@dataclass(frozen=True)
class Rates:
    """Speeds of the machine: the mean over some ranks."""

    latency: float  # seconds of an almost empty collective
    bandwidth: float  # bytes per second that one rank sends while all do
    flops: float  # operations per second of attention
    memory: float  # bytes per second of reading and writing
    # Part of a computation that a transfer overlaps with, as measured; the idle part of a CPU rank's core
    overlap: float
    linear: float = math.inf  # operations per second of a matrix product
    launch: float = 0.0  # seconds of the host to launch one operation
    units: float = 1  # tiles of an attention that the device computes in parallel; 1 = it is not divided


@dataclass(frozen=True)
class AttentionShape:
    """One attention over the whole sequence. The batch may be fractional, as a part of the stacked items."""

    batch: float
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int


# Looking up a frozen dataclass is faster than making one, and the blocks of a model attend alike.
attention_shape = lru_cache(maxsize=1024)(AttentionShape)


@dataclass(frozen=True)
class Cost:
    """Cost of one attention for one rank."""

    bytes_sent: float  # to other ranks
    communication: float  # seconds spent waiting for them
    compute: float  # seconds of attention and merging
    rounds: int = 1  # of Ulysses

    @property
    def total(self) -> float:
        return self.communication + self.compute


def cost(shape: AttentionShape, ring: int, ulysses: int, settings: SequenceSettings, rates: Rates, shares: Shares = ()) -> Cost:
    """Evaluate the model, with the settings' method and rounds."""
    ranks = ring * ulysses
    element = shape.batch * (shape.head_dim * shape.itemsize if settings.exchange == EXACT else shape.head_dim + SCALE)
    kv_heads = shape.kv_heads * (repeats(shape.heads, shape.kv_heads, ulysses) if ulysses > 1 else 1)
    queries, keys = shape.queries * shape.heads, 2 * shape.keys * kv_heads  # elements of D
    weights = shares or (1,) * ranks
    total, columns = sum(weights), tuple(sum(weights[place::ulysses]) for place in range(ulysses))
    heads = [count / kv_heads for count in split_sizes(kv_heads, ulysses, columns)]
    chunks = [sum(weights[row * ulysses : (row + 1) * ulysses]) / total for row in range(ring)]
    heads_sent = keys_sent = attention = merging = 0.0
    for rank, weight in enumerate(weights):
        tokens, chunk, own = weight / total, chunks[rank // ulysses], heads[rank % ulysses]
        speed = weight * ranks / total  # of the mean rank
        heads_sent = max(heads_sent, tokens * (1 - own) * (queries + keys) + (chunk - tokens) * own * queries)
        keys_sent = max(keys_sent, own * keys * (1 - min(chunks)))
        attention = max(attention, own * chunk / speed)
    heads_sent, keys_sent = element * heads_sent, element * keys_sent
    merging = 4 * 4 * shape.batch * shape.head_dim * queries * attention / rates.memory
    attention *= 4 * shape.batch * queries * shape.keys * shape.head_dim / rates.flops
    waiting, rounds = 0.0, 1
    if ulysses > 1:
        most = max(split_sizes(kv_heads, ulysses, columns))
        tiles = shape.batch * shape.heads / kv_heads * math.ceil(shape.queries / ring / TILE)

        def waits(rounds: int) -> float:
            """Return the seconds beyond those of attention in one round."""
            waves, in_one = (
                sum(math.ceil(heads * tiles / rates.units) for heads in split_sizes(most, parts)) for parts in (rounds, 1)
            )
            busy = attention * waves / in_one if in_one else 0.0
            apart = 2 * rates.latency + heads_sent / rounds / rates.bandwidth
            more = max(0.0, apart - rates.overlap * busy / rounds) + ROUND_LAUNCHES * rates.launch
            return apart + (rounds - 1) * more + busy - attention

        given = ROUNDS[:1] if ring > 1 else (settings.ulysses_rounds,) if settings.ulysses_rounds else ROUNDS
        waiting_in = {each: waits(each) for each in given if each <= most} or {1: waits(1)}
        limit = ROUNDS_TOLERANCE * attention + min(waiting_in.values())
        rounds, waiting = next(found for found in waiting_in.items() if found[1] <= limit)
    if ring > 1 and settings.rotate_method == "allgather":
        waiting += rates.latency + keys_sent / rates.bandwidth
    elif ring > 1:
        step = rates.latency + keys_sent / (1 - min(chunks)) * max(chunks) / rates.bandwidth
        waiting += (ring - 1) * max(0.0, step - rates.overlap * attention / ring)
        attention += (ring - 1) * merging
    return Cost(heads_sent + keys_sent, waiting, attention, rounds)


def choose(shape: AttentionShape, ranks: int, settings: SequenceSettings, rates: Rates, shares: Shares = ()) -> tuple[int, int]:
    """Return the (ring, ulysses) of least cost, among those that the settings allow if there are any."""
    return min(
        allowed(shape, ranks, settings, shares) or factors(ranks),
        key=lambda pair: (cost(shape, pair[0], pair[1], settings, rates, shares).total, pair[0]),
    )


def allowed(shape: AttentionShape, ranks: int, settings: SequenceSettings, shares: Shares = ()) -> list[tuple[int, int]]:
    """Return every (ring, ulysses) that the settings allow for an attention."""
    units = sum(shares) or ranks
    even = shape.queries % units == 0 and shape.keys % units == 0
    return [
        (ring, ulysses)
        for ring, ulysses in factors(ranks)
        if (ring == 1 or settings.ring_anything or even)
        and (ulysses == 1 or settings.ulysses_anything or (even and shape.kv_heads % (units // ring) == 0))
    ]


# Every rank decides for itself: ranks with different answers would enter different collectives, and hang. So the arguments are
# equal on all: gathered rates, lengths of all ranks, settings of the message. None is measured here.
@lru_cache(maxsize=1024)
def decide(
    shape: AttentionShape, ranks: int, settings: SequenceSettings, rates: Rates, shares: Shares = ()
) -> tuple[ContextParallelConfig, Cost]:
    """Return the config and the predicted cost of an attention. Equal arguments give the same answer on every rank."""
    given = (1, ranks) if settings.all_tokens else (settings.ring_degree, settings.ulysses_degree)
    # Degrees set by the user are for the ranks beside a full batch axis. With fewer groups the rest of that axis is folded in.
    chosen = given if math.prod(given) == ranks else choose(shape, ranks, settings, rates, shares)
    predicted = cost(shape, chosen[0], chosen[1], settings, rates, shares)
    return settings.with_degrees(*chosen, predicted.rounds), predicted


class DegreePlanner:
    """The degrees of every attention of a call on some ranks, and the sum of the predicted costs."""

    def __init__(self, settings: SequenceSettings, ranks: int, rates: Rates, shares: Shares = ()) -> None:
        self.settings, self.ranks, self.rates, self.shares = settings, ranks, rates, shares
        self.chosen: tuple[int, int] | None = None
        self.bytes_sent = self.seconds = 0.0
        self._decided: dict[AttentionShape, tuple[ContextParallelConfig, Cost]] = {}  # blocks mostly attend alike

    def __call__(self, shape: AttentionShape) -> ContextParallelConfig:
        decided = self._decided.get(shape)
        if decided is None:
            decided = self._decided[shape] = decide(shape, self.ranks, self.settings, self.rates, self.shares)
        config, predicted = decided
        self.chosen = config.mesh_shape
        self.bytes_sent += predicted.bytes_sent
        self.seconds += predicted.communication
        return config
