"""PipeFusion of diffusers' models, with xDiT's names of settings: their calls pass through the stages of `engine.pipeline`.

Every rank runs the caller's pipeline and its scheduler, as with every other degree; the last stage sends the others the result. All
ranks keep all weights, and compute those of their stage.
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
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from ..errors import PlanError, bad_value
from ..nested import form_of, map_tensors, tensors
from .calls import ShardedCalls, map_outputs
from .table import ENCODER, HIDDEN, own_table
from .torch_function import SharedAttention

TOKENS, GATHERED = ContextParallelInput(1, 3), {"proj_out": ContextParallelOutput(1, 3)}
JOINT = ModulePlan(attention=(ENCODER, HIDDEN))
CROSS = {"*": ModulePlan(attention=(HIDDEN,)), "*.attn2": ModulePlan(attention=())}
ROPE = ContextParallelInput(0, 2, streams=(HIDDEN,), side=True)
Table = dict[str, Any]
TABLES: dict[str, Table] = {
    "FluxTransformer2DModel": {"transformer_blocks.*": JOINT, "single_transformer_blocks.*": JOINT},
    "WanTransformer3DModel": {f"blocks.{path}": plan for path, plan in CROSS.items()},
    "SD3Transformer2DModel": {
        "transformer_blocks.0": {HIDDEN: TOKENS, ENCODER: TOKENS},
        "transformer_blocks.*": ModulePlan(attention=(HIDDEN, ENCODER)),
        "transformer_blocks.*.attn2": ModulePlan(attention=(HIDDEN,)),
        **GATHERED,
    },
    "PixArtTransformer2DModel": {
        "transformer_blocks.0": {HIDDEN: TOKENS},
        **{f"transformer_blocks.{path}": plan for path, plan in CROSS.items()},
        **GATHERED,
    },
    "HunyuanDiT2DModel": {
        "blocks.0": {HIDDEN: TOKENS},
        "blocks.*": ModulePlan(inputs={"image_rotary_emb": ROPE}, attention=(HIDDEN,)),
        "blocks.*.attn2": ModulePlan(attention=()),
        **GATHERED,
    },
}


def table_of(module: nn.Module) -> Table:
    """Return the plan for stages of a module of diffusers. Raises PlanError: there is none for its class."""
    name = type(module).__name__
    if name not in TABLES:
        raise PlanError(
            f"{name} has no plan for pipefusion_degree; {', '.join(TABLES)} have. Pass a plan, or leave the degree at 1."
        )
    optional = {} if any(path.endswith(".attn2") for path, _ in module.named_modules()) else {"transformer_blocks.*.attn2"}
    return {**(own_table(module) or {}), **{path: plan for path, plan in TABLES[name].items() if path not in optional}}


class StagedCalls(ShardedCalls):
    """Runs a module's own forward in stages. See `ShardedCalls`."""

    _in_step = False  # stages have different numbers of messages

    def __init__(self, installed: InstalledPlan[ShardingPlan], config: ContextParallelConfig, *given: Any, **checks: Any) -> None:
        super().__init__(installed, config, *given, **checks)
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
        lane = config.batch.stage(config.pipefusion_degree).pipeline_group
        self._pipeline = Pipeline(Stages(blocks, cut([b.nbytes for b in blocks], lane.size), lane), lane)
        self._lane, self._alone = lane, SequenceMesh(None)
        self._timestep, self._run = float("inf"), 0
        self._texts: dict[int, Any] = {}  # of the run, by id: they must live as long as what is kept for them

    def _sharded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], ask: Callable[[], None] | None = None) -> Any:
        named = dict(zip(self._names, args, strict=False)) | dict(kwargs)
        self._note_run(named)
        text = named.get(ENCODER)
        self._texts[id(text)] = text

        def run(mesh: SequenceMesh, kind: Callable[..., RunningCall]) -> Any:
            # Forwards may change what they are given.
            fresh_args, fresh_kwargs = map_tensors((args, dict(kwargs)), Tensor.clone)
            with self._installed.call(mesh, lambda shape: self._config, kind=kind) as call, SharedAttention(call):
                return self._installed.forward(self._stock, *fresh_args, **fresh_kwargs)

        part = Part(form_of((args, dict(kwargs))), id(text), run)
        (out,) = self._pipeline.call([part], self._alone, self._settings_of_stages)
        return map_outputs(out, self._of_last_stage)

    def _note_run(self, named: Mapping[str, Any]) -> None:
        """Begin a run where the timestep is later than before: nothing that is kept belongs to it."""
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
