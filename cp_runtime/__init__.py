"""Context parallelism: sharded attention, sharding plans and the worker pool. Imports without ComfyUI."""

from .api import apply_context_parallel, remove_context_parallel
from .config import ContextParallelConfig, ParallelConfig
from .plan import ModulePlan, ShardingPlan
from .transforms import ContextParallelInput, ContextParallelOutput

__all__ = [
    "ContextParallelConfig",
    "ContextParallelInput",
    "ContextParallelOutput",
    "ModulePlan",
    "ParallelConfig",
    "ShardingPlan",
    "apply_context_parallel",
    "remove_context_parallel",
]
