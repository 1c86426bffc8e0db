"""Context parallelism: sharded attention, sharding plans and the worker pool. Imports without ComfyUI."""

from .diffusers.api import apply_context_parallel, remove_context_parallel
from .diffusers.files import map_weights
from .engine.config import ContextParallelConfig, ParallelConfig
from .engine.plan import ModulePlan, ShardingPlan
from .engine.transforms import ContextParallelInput, ContextParallelOutput

__all__ = [
    "ContextParallelConfig",
    "ContextParallelInput",
    "ContextParallelOutput",
    "ModulePlan",
    "ParallelConfig",
    "ShardingPlan",
    "apply_context_parallel",
    "map_weights",
    "remove_context_parallel",
]
