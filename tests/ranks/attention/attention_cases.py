"""The matrix of attention cases. Imported by the rank script and by the test: only the standard library here."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

# (name, ring degree, ulysses degree, rotate_method, packed): degrees of 0 are the world size
MODES = {
    "ulysses": (1, 0, "allgather", True),
    "ulysses separate": (1, 0, "allgather", False),
    "ring alltoall": (0, 1, "alltoall", True),
    "ring allgather": (0, 1, "allgather", True),
    "unified alltoall": (2, 2, "alltoall", True),
    "unified allgather": (2, 2, "allgather", True),
}
# odd and even lengths, streams shorter than the world, one stream, fewer tokens than ranks
LENGTHS = [(5, 13), (8, 16), (1, 7), (17,), (1, 3), (2,)]
# MHA and GQA, heads that do not divide, fewer key/value heads or heads than ranks
HEADS = [(4, 4), (3, 3), (2, 2), (6, 2), (4, 1)]
MASKS = [None, "ones", "keys", "full", "additive", "heads", "heads without batch", "lowest"]
MASKS += ["one rank hidden", "row hidden", "local keys"]
HALF_MASKS = [None, "full"]
WHOLE = os.environ.get("CP_SOAK") == "1" or os.environ.get("CP_TEST_DEVICE", "cpu") != "cpu"
"""Whether two ranks meet every combination: in `make soak` and on GPUs."""
# Of unequal ranks. Those are the same arithmetic from the sizes on, so that one mask of every combination will do.
SHARES = {2: [(2, 1), (3, 1), (5, 3)], 3: [(4, 2, 1)], 4: [(3, 1, 2, 2)]}


def modes(world: int) -> list[str]:
    """Modes that a number of ranks can run."""
    return [mode for mode, (ring, ulysses, *_) in MODES.items() if (ring or world) * (ulysses or world) == world]


@dataclass(frozen=True)
class Case:
    mode: str
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    batch: int
    mask: str | None
    dtype: str
    shares: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        H, K = self.heads
        tokens = "+".join(map(str, self.lengths))
        shares = f", shares {':'.join(map(str, self.shares))}" if self.shares else ""
        return f"{self.mode}: {tokens} tokens, {H}/{K} heads, batch {self.batch}, mask {self.mask}, {self.dtype}{shares}"


def cases(world: int, whole: bool = WHOLE) -> Iterator[Case]:
    """Every case for a number of ranks, in an order that all ranks share.

    Every two of tokens, heads and mask meet in every mode: a fifth of the combinations. `whole` has two ranks meet all of them.
    """
    for number, (mode, lengths, heads, mask) in enumerate(itertools.product(modes(world), LENGTHS, HEADS, MASKS)):
        if not (whole and world == 2) and (LENGTHS.index(lengths) + 3 * MASKS.index(mask)) % len(HEADS) != HEADS.index(heads):
            continue
        batch = 1 + number % 2  # by turns: with 11 masks and 5 pairs of heads, everything meets both
        yield Case(mode, lengths, heads, batch, mask, "float32")
        if mask in HALF_MASKS:
            yield Case(mode, lengths, heads, batch, mask, "bfloat16")
            if batch == 1:
                yield Case(mode, lengths, heads, batch, mask, "float16")
    for number, (shares, mode, lengths, heads) in enumerate(itertools.product(SHARES[world], modes(world), LENGTHS, HEADS)):
        yield Case(mode, lengths, heads, 1 + number % 2, MASKS[number % len(MASKS)], "float32", shares)
