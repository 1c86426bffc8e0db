"""Blocks of a model compiled by torch, with all sharding outside of the compiled code.

The forward of a block is compiled. The hooks of plans and sharded weights stay around it. Attention inside it is one opaque
operator (`attention.opaque`), as is a layer with quantised weights (`opaque_layers`). Blocks of a class share compiled code, as
weights are inputs of a graph. A block is compiled whole or not at all, so a failure comes before any part of it has run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..compat import compiler_errors, compiler_settings
from ..errors import CompileError
from .attention.opaque import COMPILING
from .opaque_layers import make_opaque
from .plan import ShardingPlan, find_modules, method_of
from .weights.blocks import blocks_of

# Inductor's tuning options. Its other options name compilers, files and functions.
OPTIONS = (
    "coordinate_descent_tuning",
    "epilogue_fusion",
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "shape_padding",
)
VARIANTS = 64  # compiled versions per kind of block, for other dtypes, numbers of dimensions, masks; torch's own limit is 8
Failed = Callable[[CompileError], None]
AS_THEY_ARE: set[nn.Module] = set()
"""Blocks not compiled in the running call, because something inside them changes with every call."""


@dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """Settings for `torch.compile`.

    Args:
        backend, mode, options: as in `torch.compile`; options as pairs, so that settings can be compared.
        dynamic: whether sizes may change without recompilation; None = not at first: fixed sizes need fewer checks, which are
            time of the host in every block. At a second size torch compiles once more, for all that follow.
    """

    backend: str = "inductor"
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    dynamic: bool | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        named = {"backend": self.backend, "fullgraph": True}
        chosen = {"mode": self.mode or None, "options": dict(self.options) or None, "dynamic": self.dynamic}
        return named | {name: value for name, value in chosen.items() if value is not None}


class CompiledBlocks:
    """The blocks of a model, compiled when they first run.

    Args:
        model: in eval mode.
        plan: of the model. Blocks inside which it splits or gathers stay uncompiled.

    Attributes:
        failed: called whenever a block runs that could not be compiled. If it raises, so does the call; otherwise the block runs
            uncompiled.
        kinds: class of compiled blocks -> number of blocks.
        left: class of uncompiled blocks -> reason: the plan, or the compiler's error.
    """

    def __init__(self, model: nn.Module, plan: ShardingPlan, settings: CompileSettings) -> None:
        self.kinds: dict[str, int] = {}
        self.left: dict[str, str] = {}
        self.settings = settings
        self.failed: Failed = lambda error: None
        self._wrapped: list[nn.Module] = []
        self._given_up: dict[type[nn.Module], CompileError] = {}
        others = [pattern for pattern in plan.modules if method_of(pattern) != "forward"]
        methods = {name for pattern in others for name, _ in find_modules(model, pattern)}
        planned = [name for pattern in (*plan.modules, *plan.outputs) for name, _ in find_modules(model, pattern)]
        for block in blocks_of(model):
            module, kind = block.module, type(block.module).__name__
            if not any(module.children()) or "forward" in vars(module):
                continue
            if any(name.startswith(f"{block.name}.") for name in planned):
                self.left[kind] = "the plan splits or gathers tokens inside of it"
                continue
            if block.name in methods:
                self.left[kind] = "the model calls other methods of it than forward"
                continue
            cls: Any = type(module)
            layers = make_opaque(module)
            module.forward = functools.partial(self._run, module, _compiled(cls, settings), layers)
            self._wrapped += [module, *layers]
            self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def remove(self) -> None:
        while self._wrapped:
            del self._wrapped.pop().forward

    def _run(self, module: nn.Module, compiled: Callable[..., Any], layers: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
        cls = type(module)
        COMPILING.in_block, COMPILING.local, COMPILING.layers = True, 0, layers
        try:
            if module in AS_THEY_ARE:
                return cls.forward(module, *args, **kwargs)
            if cls in self._given_up:
                self.failed(self._given_up[cls])
                return cls.forward(module, *args, **kwargs)
            with compiler_settings(VARIANTS):
                return compiled(module, *args, **kwargs)
        except compiler_errors() as error:
            out = cls.forward(module, *args, **kwargs)  # raises if the arguments are wrong, rather than the compiler
            self._given_up[cls] = CompileError(cls.__name__, self.settings.backend, _first_line(error))
            self.left[cls.__name__] = _first_line(error)
            self.kinds.pop(cls.__name__, None)
            self.failed(self._given_up[cls])
            return out
        finally:
            COMPILING.in_block, COMPILING.local, COMPILING.layers = False, 0, ()


@functools.cache
def _compiled(cls: Any, settings: CompileSettings) -> Callable[..., Any]:
    """Compile the forward of a class: a function of the module and its arguments.

    torch caches compiled code by function, so a reloaded model, or a second one of the class, reuses it.
    """
    return torch.compile(cls.forward, **settings.arguments)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
