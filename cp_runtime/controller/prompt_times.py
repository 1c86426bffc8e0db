"""Where the time of a prompt went, by parts of it, and what it would have taken on another number of devices."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

TEXT, LOADING, DENOISING, CONTROLNET, VAE, UPSCALING, OTHER = PARTS = (
    "text", "loading", "denoising", "controlnet", "vae", "upscaling", "other",
)  # fmt: skip
"""Parts of a prompt, keys of their names, of "part"; in the order of the bar."""
CLEAR = 0.05  # of the prompt's time: a prediction that differs by less says nothing


@dataclass(frozen=True)
class SampledRun:
    """A sampling run of the prompt."""

    calls: int
    per_call: float  # seconds
    unit: str  # key of the devices' name, of "unit"
    other: tuple[int, float] | None  # another number of devices, and the seconds per call measured there


@dataclass
class PromptTimes:
    """The seconds of one prompt, noted while its nodes run, in their thread. `prompt_id`: of ComfyUI; empty = no prompt yet."""

    prompt_id: str = ""
    began: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by part
    shared: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # of these, of nodes that several devices served
    runs: list[SampledRun] = field(default_factory=list)
    nodes: int = 0  # that ran
    unfinished: bool = False  # a node of it runs, or failed or was interrupted

    def __post_init__(self) -> None:
        self._part, self._since, self._moved, self._is_shared, self._inside = OTHER, self.began, 0.0, False, False
        self._is_open = False  # a node has begun

    def enter(self, part: str) -> None:
        """Begin a node, which belongs to a part."""
        self.leave()
        self._part, self._is_open, self.unfinished = part, True, True
        self.nodes += 1

    def leave(self) -> None:
        """End the node. The time until the next one belongs to no node."""
        now = time.monotonic()
        self._close(now - self._since)
        self._since, self.unfinished = now, False

    def end(self, seconds: float) -> None:
        """End the prompt so many seconds after it began: a node that failed or was interrupted ended with it."""
        if self._is_open:
            self._close(seconds - (self._since - self.began))

    def _close(self, seconds: float) -> None:
        own = max(0.0, seconds - self._moved)
        self.seconds[self._part] += own
        if self._is_shared:
            self.shared[self._part] += own
        self._part, self._moved, self._is_shared, self._is_open = OTHER, 0.0, False, False

    def take(self, part: str, seconds: float) -> None:
        """Count some of the node's seconds for another part."""
        if not self._inside:
            self.seconds[part] += seconds
            self._moved += seconds

    @contextmanager
    def taking(self, part: str) -> Iterator[None]:
        """Count the seconds inside the context for another part; inside of another one they are counted already."""
        before, began, self._inside = self._inside, time.monotonic(), True
        try:
            yield
        finally:
            self._inside = before
            self.take(part, time.monotonic() - began)

    def share(self) -> None:
        """Note that several devices compute for the node."""
        self._is_shared = True

    def described(self, cached: int) -> dict[str, Any]:
        """Return the ended prompt for the status. `cached`: number of nodes whose results were there already."""
        total = sum(self.seconds.values())
        parts = [
            {"part": part, "seconds": self.seconds[part], "on_all": self.shared.get(part, 0.0)}
            for part in PARTS
            if self.seconds.get(part, 0.0) > 0
        ]
        return {"id": self.prompt_id, "seconds": total, "parts": parts, "cached": cached, "sentence": self._sentence(total, cached)}

    def _sentence(self, total: float, cached: int) -> dict[str, Any]:
        """Return the parts of the words about the prompt: `cases`, keys of sentences of "prompt", and their numbers as text."""
        cases, values = [], {"seconds": rounded(total), "cached": str(cached)}
        if not self.nodes and cached:
            return {**values, "cases": ["all_cached"]}
        if denoising := self.seconds.get(DENOISING):
            cases.append("denoising")
            values["denoising"] = rounded(denoising)
        others = {run.other[0] for run in self.runs if run.other}
        if self.runs and all(run.other for run in self.runs) and len(others) == 1 and len({run.unit for run in self.runs}) == 1:
            there = total + sum(run.calls * (run.other[1] - run.per_call) for run in self.runs if run.other)
            (count,), unit = others, self.runs[0].unit
            if count > 1 and there < total * (1 - CLEAR):
                cases.append("together")
            elif count == 1 and there > total * (1 + CLEAR):
                cases.append("alone")
            values |= {"there": rounded(there), "count": str(count), "unit": unit}
        if cached:
            cases.append("cached")
        return {**values, "cases": cases}


def rounded(seconds: float) -> str:
    """Return seconds as text, with at most two digits below ten."""
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def seconds_of(messages: Sequence[tuple[str, Any]]) -> float:
    """Return the seconds of an ended prompt, by the messages in ComfyUI's history of it."""
    times = [data["timestamp"] for _, data in messages if "timestamp" in data]
    return (max(times) - min(times)) / 1e3 if times else 0.0


def cached_nodes(messages: Sequence[tuple[str, Any]]) -> int:
    """Return the number of nodes whose results ComfyUI had, by the messages in its history of a prompt."""
    return sum(len(data.get("nodes", ())) for name, data in messages if name == "execution_cached")
