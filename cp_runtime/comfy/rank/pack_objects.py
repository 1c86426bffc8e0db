"""Object patches of node packs, on a rank: this rank's tokens, and all heads, pass through them."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ...engine.call import RunningCall
from ...engine.compiled import AS_THEY_ARE
from ..shared.patches import code_of
from .whole_tokens import InPlace, plain

ATTENTION = "optimized_attention"


@contextmanager
def objects_in_place(objects: Mapping[str, Any], model: nn.Module, call: RunningCall) -> Iterator[None]:
    """Replace the forwards of a model's modules according to object patches, by their paths, while active.

    Blocks with such modules are not compiled: the replacement is a new function in every call.
    """
    with ExitStack() as undo:
        for module in map(sys.modules.__getitem__, _modules_of(objects)):
            for name in _HELPERS.keys() & vars(module).keys():
                undo.callback(setattr, module, name, vars(module)[name])
                setattr(module, name, functools.partial(_HELPERS[name], call))
        for path, thing in objects.items():
            for above in _above(path.removesuffix(".forward"), model):
                AS_THEY_ARE.add(above)
                undo.callback(AS_THEY_ARE.discard, above)
            undo.callback(_put(path, thing, model))
        yield


def attention_names(objects: Mapping[str, Any], of_models: bool) -> frozenset[str]:
    """Return the full names of ComfyUI's attention in modules of objects and of ComfyUI; `of_models`: in all of its models'."""
    packs, of_comfy = _modules_of(objects), "comfy.ldm." if of_models else "comfy.ldm.modules.attention"
    modules = [(name, each) for name, each in list(sys.modules.items()) if name.startswith(of_comfy) or name in packs]
    return frozenset(f"{name}.{ATTENTION}" for name, module in modules if ATTENTION in vars(module))


def _modules_of(objects: Mapping[str, Any]) -> set[str]:
    return {function.__module__ for function in map(code_of, map(plain, objects.values()))}


def _put(path: str, thing: Any, model: nn.Module) -> Callable[[], Any]:
    """Put an object into a model, of a listed module its forward: hooks stay where they are. Return the undo."""
    place, _, name = path.rpartition(".")
    owner = model.get_submodule(place)
    if isinstance(thing, InPlace):
        undo = _set(thing.module, "forward", thing.forward), _set(owner, name, thing.module)
        return lambda: [each() for each in reversed(undo)]
    if isinstance(inner := getattr(owner, name, None), nn.Module) and isinstance(thing, nn.Module):
        owner, name, thing = inner, "forward", thing.forward
    return _set(owner, name, thing)


def _set(owner: nn.Module, name: str, thing: Any) -> Callable[[], Any]:
    before = getattr(owner, name, None)
    had = any(name in held for held in (vars(owner), owner._parameters, owner._buffers, owner._modules))
    setattr(owner, name, thing)
    return (lambda: setattr(owner, name, before)) if had else (lambda: delattr(owner, name))


def _above(path: str, model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules around the one at a path, without the model."""
    parts = path.split(".")
    return (model.get_submodule(".".join(parts[:count])) for count in range(1, len(parts)))


def _between_frames(call: RunningCall, query: Tensor, key: Tensor, num_frames: int, enhance_weight: float) -> Tensor:
    """Return how much Enhance-A-Video scales the output of Wan's attention, at least 1: the mean attention between two different
    frames, at the same position in both, over all positions, heads and items, times frames and weight.

    A position's tokens are on several ranks: as in Ulysses, each rank gets all tokens of its share of the heads, from one exchange.
    The sums over these heads are gathered and added up in the order of the ranks, so that all ranks get the same number.

    Args:
        query, key: `[B, L of this rank, heads, D]`.
    """
    heads, (q_BHCD, k_BHCD) = query.shape[2], call.to_heads([query, key])
    B, own, C, D = q_BHCD.shape
    if C % num_frames:
        raise ValueError(
            f"Enhance-A-Video: {C} tokens are not {num_frames} frames of as many tokens each. Connect the latent that is sampled."
        )
    q, k = (t.unflatten(2, (num_frames, -1)).transpose(2, 3) for t in (q_BHCD, k_BHCD))  # [B, heads, positions, frames, D]
    scores = ((q * D**-0.5) @ k.mT).float().softmax(-1)
    same = scores.diagonal(dim1=-2, dim2=-1)
    total = (scores.sum() - same.sum()) if own else scores.new_zeros(())
    if call.mesh.size > 1 and not call.attention_is_local:
        (sums,) = call.mesh.whole.all_gather([total.reshape(1)], [1] * call.mesh.size, 0)
        total = sums.sum()
    pairs = num_frames * num_frames - num_frames
    mean = total / (math.prod((B, heads, C // num_frames)) * pairs)
    return (mean * (num_frames + enhance_weight)).clamp(min=1)


_HELPERS: Mapping[str, Callable[..., Any]] = {"get_feta_scores": _between_frames}
"""Functions of packs that need the tokens of all ranks, by `ObjectPatch.helper`, and those in their place here."""
