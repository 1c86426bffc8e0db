"""Context parallelism: sharded attention, sharding plans and the worker pool. Imports without ComfyUI."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .diffusers.api import apply_context_parallel, remove_context_parallel
    from .diffusers.weights import map_weights
    from .engine.plan import ModulePlan, ShardingPlan
    from .engine.ranks.config import ContextParallelConfig, ParallelConfig
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


def __getattr__(name: str) -> Any:
    """Import an attribute on first use: a worker needs nothing of the Python API, which imports torch's compiler."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .diffusers import api, weights
    from .engine import plan, transforms
    from .engine.ranks import config

    return next(vars(home)[name] for home in (api, weights, config, plan, transforms) if name in vars(home))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
