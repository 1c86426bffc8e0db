"""How many times as fast several devices are as one: the one calculation that panel, nodes, report and picture show."""

from __future__ import annotations

from dataclasses import dataclass

WORDS = {
    "one_device": "one device",
    "compared": "{times:.2f} × as fast as one device",
    # The one device had other work, or another attention kernel, or too little memory for the weights.
    "too_fast": "{times:.2f} × as fast as one device (more than {ranks} can gain: measure again)",
    "too_few": "known after two calls",
    "not_measured": "not measured yet",
    "obstacle": "not measured: {obstacle}",
}
"""What there is to say, by case. The panel says it in other languages as well."""
NOT_MEASURED = WORDS["not_measured"]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of a sampling run.

    Args:
        ranks: that shared a call; 1 = one device computed it.
        per_call: seconds from one call to the next; None = there were too few calls.
        on_one_device: the same on one device; None = it was not measured.
        obstacle: why it could not be measured; empty = it could.
    """

    ranks: int
    per_call: float | None
    on_one_device: float | None
    obstacle: str = ""

    @property
    def times(self) -> float | None:
        """How many times as fast as one device. None on one device, and where one of both is not known."""
        if self.ranks == 1 or not self.per_call or self.on_one_device is None:
            return None
        return self.on_one_device / self.per_call

    @property
    def case(self) -> str:
        """Key of what there is to say in WORDS."""
        if self.ranks == 1:
            return "one_device"
        if self.times is not None:
            return _case(self.times, self.ranks)
        if self.on_one_device is not None:
            return "too_few"
        return "obstacle" if self.obstacle else "not_measured"

    @property
    def words(self) -> str:
        """The same for people."""
        return WORDS[self.case].format(times=self.times, ranks=self.ranks, obstacle=self.obstacle)


def times_in_words(times: float, ranks: int) -> str:
    """How many times as fast as one device these ranks are."""
    return WORDS[_case(times, ranks)].format(times=times, ranks=ranks)


def _case(times: float, ranks: int) -> str:
    return "compared" if round(times, 2) <= ranks else "too_fast"
