"""One rank's calls of a model in stages, exact or in patches. It computes one part of a batch and one patch after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...errors import ConfigError, PlanError
from ...recent import Recent
from ..call import RunningCall
from ..ranks.collectives import RankGroup
from ..ranks.config import PipelineSettings
from ..ranks.mesh import SequenceMesh
from ..state import CallState
from .patches import KVCache, PatchCall
from .stages import Arriving, StagedCall, Stages, Visit

FORMS = 32  # forms of calls to remember: texts of many lengths make many


class Part(NamedTuple):
    """Items of a call that are computed at once.

    Args:
        form: key of calls that take the same path through the model, with tensors of the same shapes.
        conditioning: key of the conditioning, for the reuse of keys and values.
        run: (mesh, kind of running call) -> result of the model's forward.
    """

    form: object
    conditioning: object
    run: Callable[[SequenceMesh, Callable[..., RunningCall]], Any]


class Survey(NamedTuple):
    """The survey of a form of calls: the runs of blocks, and the tensors each run receives, by (patch, patches)."""

    visits: list[Visit]
    arriving: dict[tuple[int, int], Arriving]


class Pipeline:
    """One rank's calls of a model in stages.

    Args:
        stages: of the model.
        everyone: all ranks of all stages.
        room: returns the bytes available for caching keys and values; None = unlimited.

    Attributes:
        runs, patches: number of forwards, and of patches, in the last call.
    """

    def __init__(self, stages: Stages, everyone: RankGroup, room: Callable[[], int | None] = lambda: None) -> None:
        self.stages, self._everyone, self._room = stages, everyone, room
        self._alone = SequenceMesh(None)
        self._surveys: Recent[object, Survey] = Recent(FORMS)  # by form
        self._replicates = False  # every rank holds all of some tokens
        self._kept: dict[object, tuple[object, KVCache, int]] = {}  # by conditioning: form, tensors, calls that have written them
        self._run = ""
        self.runs = self.patches = 0

    def described(self, settings: PipelineSettings) -> dict[str, int]:
        kept = sum(kept.nbytes for _, kept, _ in self._kept.values())
        return {"stage": self.stages.stage, "stages": settings.stages, "patches": self.patches, "runs": self.runs, "kept": kept}

    def forget(self) -> None:
        """Drop the cached keys and values: the next call is exact."""
        self._kept.clear()

    def begin_run(self, run: str) -> None:
        """Drop the cached keys and values unless they belong to this run."""
        if run != self._run:
            self._run = run
            self.forget()

    def call(
        self, parts: Sequence[Part], mesh: SequenceMesh, settings: PipelineSettings, follows: Callable[[], bool] = lambda: True
    ) -> list[Any]:
        """Return the result of every part, right on the last stage. All ranks of all stages call it alike. `mesh`: the ranks of
        this stage that share the tokens; `follows`: see `Stages.run`."""
        # Of one number on all ranks: it decides how many messages there are.
        patches = settings.patches if self._may_be_stale(parts, settings) else 1
        results = []
        with self.stages.call():
            surveys = [self._survey(part, mesh.size, settings) for part in parts]
            arriving = [survey.arriving.setdefault((patch, patches), []) for survey in surveys for patch in range(patches)]
            several = len(arriving) > 1  # a single run may be left in its middle: then no message may be in flight
            for part, survey in zip(parts, surveys, strict=True):
                kinds: list[Callable[..., RunningCall]] = [StagedCall]
                if settings.patches > 1:
                    kept = self._kept_of(part, len(parts))
                    kinds = [partial(PatchCall, patch, patches, kept) for patch in range(patches)]
                for kind in kinds:
                    out = self.stages.run(survey.visits, partial(part.run, mesh, kind), arriving if several else (), follows)
                    arriving = arriving[1:]
                results.append(out)
        self.runs, self.patches = len(parts) * patches, patches
        return results

    def _may_be_stale(self, parts: Sequence[Part], settings: PipelineSettings) -> bool:
        """Return whether all ranks have keys and values of earlier calls: a rank may have dropped them."""
        if settings.patches == 1:
            return False
        lacking = 0
        for part in parts:
            form, _, calls = self._kept.get(part.conditioning, (None, None, 0))
            lacking += form != part.form or calls < max(1, settings.warmup_calls)
        return not self._everyone.largest(torch.tensor([lacking], device=self._everyone.device)).item()

    def _kept_of(self, part: Part, parts: int) -> KVCache:
        """Return the cache for a part, and count the call."""
        form, kept, calls = self._kept.get(part.conditioning, (None, None, 0))
        # The room is judged by the first attention, as if all were as large: later it would be too late to refuse the call.
        if kept is None or form != part.form:
            kept, calls = KVCache(lambda nbytes: self._check_room(nbytes * self.stages.own_blocks * parts)), 0
        self._kept[part.conditioning] = part.form, kept, calls + 1
        return kept

    def _check_room(self, nbytes: int) -> None:
        room = self._room()
        if room is not None and nbytes > room:
            raise ConfigError(
                f"PipeFusion keeps about {nbytes / 1e9:.3g} GB of keys and values per device; {room / 1e9:.3g} GB are free. "
                "Set patches to 1, use more stages, or make a smaller picture or video."
            )

    def _survey(self, part: Part, ranks: int, settings: PipelineSettings) -> Survey:
        """Return the runs of blocks. Raises PlanError, on all ranks and before any message, if they cannot run in stages."""
        if part.form not in self._surveys:
            states: list[CallState] = []

            def noted(*given: Any) -> RunningCall:
                call = StagedCall(*given)
                states.append(call.state)
                return call

            self._surveys[part.form] = Survey(self.stages.survey(partial(part.run, self._alone, noted)), {})
            self._replicates |= any(state.replicates for state in states)  # some only where a block of a new kind ran
        survey = self._surveys[part.form]
        if ranks * settings.patches > 1:
            self.stages.check_parts(survey.visits)
        if ranks > 1 and settings.patches > 1 and self._replicates:
            raise PlanError("some tokens stay whole on every rank, so that those of a stage cannot share a patch. Use one patch.")
        return survey
