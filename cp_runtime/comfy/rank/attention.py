"""ComfyUI's attention override: shares planned self-attention over the ranks, and leaves all other attention alone.

The user's attention backend is used wherever no log-sum-exp is needed: it arrives as the function to call. Where one is needed
(ring attention, alltoall), the kernel of the same name is used if there is one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...engine.attention.context_parallel import Attend
from ...engine.attention.opaque import COMPILING, Asked, Server, attention
from ...engine.call import RunningCall
from ..shared.attention import SAGE_MODES, attention_function
from .sparse import SparseAttention

KERNEL_OF = {
    "attention_sage": "sage",
    "attention_flash": "flash_attn",
    **{name: mode.kernel for name, mode in SAGE_MODES.items()},
}
OVERRIDE = "optimized_attention_override"  # in transformer_options
CHOOSES = "()"  # at the end of a name: the function returns the attention to call
# These add boolean masks to the scores as 0 and 1, others hide keys; a ring must follow the user's backend.
ADD_BOOLEAN_MASKS = ("attention_sub_quad", "attention_split")


def attention_override(
    call: RunningCall, chosen: Callable[..., Tensor] | None = None, sparse: SparseAttention | None = None
) -> Callable[..., Tensor]:
    """Return a function for `transformer_options["optimized_attention_override"]`.

    It has the signature of ComfyUI's attention functions: q, k, v are `[B, L, heads * D]`, or `[B, heads, L, D]` with
    `skip_reshape`; the output is `[B, L, heads * D]`, or `[B, heads, L, D]` with `skip_output_reshape`. In compiled blocks it
    becomes the operator that `compiled_attention` serves, independent of the call.

    Args:
        chosen: attention function that a node chose for this model, or the file for a layer; None = the one that it asks for.
        sparse: where a node chose that.

    Returns:
        The function, with `container_function`, which ComfyUI 0.32 calls where a model gives q, k and v away, each in a container:
            without an exchange, the attention function gets the containers and can free them early.
    """

    def attend(
        func: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        layer = kwargs.pop("preferred_attention", None)  # only where the model calls this by name, without options
        func = chosen or getattr(layer, "function", None) or func
        func = func if sparse is None else sparse.over(func)
        compiling = torch.compiler.is_compiling()
        if not compiling and call.attention_is_local:
            return func(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **kwargs)
        if skip_reshape:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        else:
            head_dim = q.shape[-1] // heads
            q, k, v = (t.reshape(*t.shape[:2], -1, head_dim) for t in (q, k, v))  # SD3 leaves v `[B, L, heads, D]`
        if compiling:
            out_BLHD = attention(
                q, k, v, mask, func.__name__, kwargs.get("scale"), attn_precision, kwargs.get("enable_gqa", False),
                kwargs.get("low_precision_attention", True), COMPILING.local > 0,
            )  # fmt: skip
        else:
            out_BLHD = _shared(call, func, q, k, v, mask, attn_precision, kwargs)
        return out_BLHD.transpose(1, 2) if skip_output_reshape else out_BLHD.flatten(2)

    # Two functions over that one, without references to themselves: nothing of a call may outlive it.
    def override(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return attend(func, *args, **kwargs)

    def of_containers(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Tensor:
        func = chosen or functions().optimized_attention  # the only one that models hand containers to
        takes = getattr(func, "container_function", None)
        if takes is not None and sparse is None and not torch.compiler.is_compiling() and call.attention_is_local:
            out: Tensor = takes(q, k, v, *args, **kwargs)
            return out
        return attend(func, q.take(), k.take(), v.take(), *args, **kwargs)

    override.container_function = of_containers  # type: ignore[attr-defined]
    return override


@contextmanager
def attention_by_name(names: Collection[str], override: Callable[..., Tensor]) -> Iterator[None]:
    """Replace functions that modules call by name, without transformer_options, while active: see `FamilyPlan.attention_names`."""
    with ExitStack() as undo:
        for name in names:
            module, _, function = name.removesuffix(CHOOSES).rpartition(".")
            owner = importlib.import_module(module)
            original = getattr(owner, function)
            undo.callback(setattr, owner, function, original)
            chooses = name.endswith(CHOOSES)
            setattr(owner, function, partial(_of_chosen if chooses else _named, override, original))
        yield


def _named(override: Callable[..., Tensor], original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Attend by the override, unless ComfyUI's function finds it by itself: it must not be there twice."""
    finds = OVERRIDE in (kwargs.get("transformer_options") or {})
    return original(*args, **kwargs) if finds else override(original, *args, **kwargs)


def _of_chosen(override: Callable[..., Tensor], choose: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Tensor]:
    """Wrap the attention that `choose` returns in the override."""
    return partial(override, choose(*args, **kwargs))


def functions() -> Any:
    """Return ComfyUI's module of attention functions. Not imported at the top, as benchmarks run the override without ComfyUI."""
    import comfy.ldm.modules.attention as functions

    return functions


def compiled_attention(call: RunningCall) -> Server:
    """Return the server for the attention of compiled blocks in a call."""
    known = functions()

    def attend(asked: Asked) -> Tensor:
        func = getattr(known, asked.backend, None) or attention_function(asked.backend)
        kwargs: dict[str, Any] = {"low_precision_attention": asked.low_precision}
        if asked.scale is not None:
            kwargs["scale"] = asked.scale
        if asked.grouped:
            kwargs["enable_gqa"] = True
        if not asked.local and not call.attention_is_local:
            return _shared(call, func, *asked[:4], asked.precision, kwargs)
        q_BHLD, k_BKLD, v_BKLD = (t.transpose(1, 2) for t in asked[:3])
        return _attend_with(func, asked.precision, kwargs)(q_BHLD, k_BKLD, v_BKLD, asked.mask).transpose(1, 2)

    return attend


def _shared(
    call: RunningCall,
    func: Callable[..., Tensor],
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    mask: Tensor | None,
    precision: torch.dtype | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attend over the tokens of all ranks, with the kernel equivalent to `func`."""
    if mask is not None and mask.ndim == 3:  # ComfyUI: [batch, rows, keys]
        mask = call.state.once("heads", mask, partial(mask.unsqueeze, 1))
    backend = getattr(func, "__name__", "")
    if mask is not None and mask.dtype == torch.bool and backend in ADD_BOOLEAN_MASKS:
        mask = call.state.once("numbers", mask, partial(mask.to, q_BLHD.dtype))
    attend = _attend_with(func, precision, kwargs)
    return call.attend(q_BLHD, k_BLKD, v_BLKD, mask=mask, scale=kwargs.get("scale"), attend=attend, kernel=KERNEL_OF.get(backend))


def _attend_with(func: Callable[..., Tensor], precision: torch.dtype | None, kwargs: dict[str, Any]) -> Attend:
    """Adapt one of ComfyUI's attention functions to `(q_BHLD, k_BKSD, v_BKSD, mask) -> out_BHLD`."""

    def attend(q_BHLD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None) -> Tensor:
        return func(
            q_BHLD, k_BKSD, v_BKSD, q_BHLD.shape[1], mask=mask, attn_precision=precision,
            skip_reshape=True, skip_output_reshape=True, **kwargs,
        )  # fmt: skip

    return attend
