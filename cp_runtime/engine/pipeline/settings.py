"""Settings of calls in stages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """How calls pass through the stages.

    Args:
        stages: number of them; the ranks are divided into as many groups of neighbours.
        patches: parts of the tokens that follow each other; more than one is approximate (PipeFusion).
        warmup_calls: exact calls of every conditioning in front of the approximate ones.
    """

    stages: int
    patches: int = 1
    warmup_calls: int = 1

    def bubble(self, runs: int) -> float:
        """Return the fraction of a call in which a stage has nothing to do, if all runs and stages take as long."""
        return (self.stages - 1) / (runs + self.stages - 1)
