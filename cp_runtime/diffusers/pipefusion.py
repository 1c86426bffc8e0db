"""PipeFusion of diffusers' models, with xDiT's names of settings: their calls pass through the stages of `engine.pipeline`.

Every rank runs the caller's pipeline and its scheduler, as with every other degree; the last stage sends the others the result. All
ranks hold all weights, and compute only their stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..engine.call import RunningCall
from ..engine.hooks import InstalledPlan
from ..engine.pipeline.pipeline import Part, Pipeline
from ..engine.pipeline.stages import Stages, cut, staged_blocks
from ..engine.plan import ModulePlan, ShardingPlan
from ..engine.ranks.config import ContextParallelConfig, PipelineSettings
from ..engine.ranks.mesh import SequenceMesh
from ..errors import PlanError, bad_value
from ..nested import form_of, map_tensors, tensors
from .batches import map_outputs
from .calls import ShardedCalls, enabled_caches
from .known import CLASSES, ENCODER, Table, known, own_table
from .torch_function import shared_attention

BLOCKS = ("transformer_blocks", "single_transformer_blocks", "blocks")  # diffusers' names for lists of blocks


def staged_table(module: nn.Module) -> Table:
    """Return a module's own table, which also names its blocks. Raises PlanError unless its class is known to run in stages."""
    found = known(module)
    if found is None or not found.staged:
        others = ", ".join(name for name, each in CLASSES.items() if each.staged)
        raise PlanError(
            f"{type(module).__name__} has no plan for pipefusion_degree; {others} have. Pass a plan, or leave the degree at 1."
        )
    table = own_table(module) or {}
    blocks = {f"{name}.*": ModulePlan() for name in BLOCKS if hasattr(module, name)}
    return {**table, **{path: plan for path, plan in blocks.items() if path not in table}}


class StagedCalls(ShardedCalls):
    """Calls of a module's forward in stages. See `ShardedCalls`."""

    _in_step = False  # stages have different numbers of messages

    def __init__(
        self, installed: InstalledPlan[ShardingPlan], config: ContextParallelConfig, mesh: SequenceMesh, **checks: bool
    ) -> None:
        super().__init__(installed, config, mesh, **checks)
        blocks = staged_blocks(installed.model, installed.plan)
        for block in blocks:
            if getattr(block.module, "_compiled_call_impl", None) is not None:
                raise bad_value(
                    "pipefusion_degree",
                    config.pipefusion_degree,
                    "1 for compiled blocks",
                    "Apply it to a model that is not compiled.",
                )
        self._settings_of_stages = PipelineSettings(
            stages=config.pipefusion_degree,
            patches=config.num_pipeline_patch or config.pipefusion_degree,
            warmup_calls=config.warmup_steps,
        )
        self._ranks, self._lane = config.batch.stage(config.pipefusion_degree)
        stages = Stages(blocks, cut([b.nbytes for b in blocks], self._lane.size), self._lane)
        self._pipeline = Pipeline(stages, config.batch.whole)
        self._timestep, self._run = float("inf"), 0
        self._texts: dict[int, Any] = {}  # of the run, by id: they must live as long as the cache for them

    def _call(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if caches := enabled_caches(self._module):
            raise PlanError(
                f"{type(self._module).__name__}: a step cache ({caches}) keeps what blocks return, and a stage computes only "
                "some, several times per call. Call disable_cache(), or leave pipefusion_degree at 1."
            )
        return super()._call(called, args, kwargs)

    def _sharded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], ask: Callable[[], None] | None = None) -> Any:
        named = dict(zip(self._names, args, strict=False)) | dict(kwargs)
        self._note_run(named)
        text = named.get(ENCODER)
        self._texts[id(text)] = text
        share, sequence, degrees, args, kwargs = self._slice(self._ranks, self._ranks, args, kwargs)

        def run(mesh: SequenceMesh, kind: Callable[..., RunningCall]) -> Any:
            # Forwards may modify their arguments.
            fresh_args, fresh_kwargs = map_tensors((args, dict(kwargs)), Tensor.clone)
            with self.installed.call(mesh, lambda shape: degrees, kind=kind) as call, shared_attention(call, call.mesh.whole):
                return self.installed.forward(self._stock, *fresh_args, **fresh_kwargs)

        # A text is known by its identity: pipelines pass the same tensor in every step; comparing numbers waits for the device.
        part = Part(form_of((args, dict(kwargs))), id(text), run)
        (out,) = self._pipeline.call([part], sequence, self._settings_of_stages)
        out = map_outputs(out, self._of_last_stage)
        return out if share is None else share.gather(out)

    def _note_run(self, named: Mapping[str, Any]) -> None:
        """Begin a run, without the old cache, where the timestep is later than before."""
        timestep = max((tensor.max().item() for tensor in tensors(named.get("timestep"))), default=float("inf"))
        if timestep > self._timestep:
            self._run += 1
            self._texts.clear()
        self._timestep = timestep
        self._pipeline.begin_run(str(self._run))

    def _of_last_stage(self, out: Any) -> Any:
        """Return the output of the last stage, which is rank 0 of the lane, on every rank."""
        return map_tensors(out, self._received)

    def _received(self, value: Tensor) -> Tensor:
        own = value if self._lane.rank == 0 else value.new_empty((0, *value.shape[1:]))
        (whole,) = self._lane.all_gather([own], [value.shape[0]] + [0] * (self._lane.size - 1), 0)
        return whole
