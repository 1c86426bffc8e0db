"""Wan 2.1 and 2.2: text and image to video, per-frame timesteps, in-context references, camera control, VACE, SCAIL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from .family import FamilyPlan, gathered, side, tokens

VIDEO = ("video",)
EXTRA_TOKENS = ("time_dim_concat", "reference_latent", "context_latents", "pose_latents")


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Localise a value per run of tokens, `[B, runs, ...]`, which the module repeats over its tokens (`repeat_e`).

    It passes unchanged if repeating it over the local tokens is equivalent (streams split inside each run), because a value per
    token is large. Values with other dimensions, or with one run, apply to all tokens and pass too.
    """

    streams: tuple[str, ...]
    ndim: int

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if not isinstance(value, Tensor) or value.ndim != self.ndim or value.shape[1] == 1 or state.world_size == 1:
            return value
        return state.once(self, value, lambda: self._local(state, value))

    def _local(self, state: CallState, value: Tensor) -> Tensor:
        layout, runs = state.layout(self.streams), value.shape[1]

        def due_on(device: torch.device | str) -> Tensor:
            # The tokens of a run are rounded up where they are not whole; so the last run may be shorter.
            return layout.take_local(torch.arange(layout.total, device=device) // -(-layout.total // runs), state.rank, 0)

        due = due_on("cpu")
        # It does not repeat values that it finds once per token, and takes them for that below two tokens per run.
        fits = len(due) == runs or len(due) // runs != 1
        if fits and torch.equal(due, torch.arange(len(due)) // -(-len(due) // runs)):
            return value
        return value.index_select(1, due_on(value.device))  # a copy to a GPU makes the host wait


def timed_frames(state: CallState) -> int:
    """Return the number of frames if each has its own timestep and there are no other tokens, else 1."""
    x, timestep = state.arguments["x"], state.arguments["timestep"]
    plain = all(state.arguments.get(name) is None for name in EXTRA_TOKENS)
    return x.shape[2] if plain and timestep.ndim == 2 and timestep.shape[1] == x.shape[2] else 1


FREQS = side(VIDEO, dim=1, dims=6)


def block(frames: Callable[[CallState], int], *local: str) -> ModulePlan:
    """Plan blocks of video tokens, split inside each frame; `local` names submodules with local attention besides cross_attn."""
    return ModulePlan(
        inputs={"x": tokens(VIDEO, frames=frames), "freqs": FREQS, "e": Repeated(streams=VIDEO, ndim=4)},
        attention=VIDEO,
        local=("cross_attn", *local),
    )


BLOCK = block(timed_frames)
HEAD = ModulePlan(inputs={"e": Repeated(streams=VIDEO, ndim=3)})

WAN = FamilyPlan(
    family="Wan",
    model_class="comfy.ldm.wan.model.WanModel",
    modules={"blocks.*": BLOCK, "head": HEAD},
    outputs={"head": gathered("video")},
)
CAMERA = replace(WAN, family="Wan Camera", model_class="comfy.ldm.wan.model.CameraWanModel")
SCAIL = replace(WAN, family="SCAIL", model_class="comfy.ldm.wan.model.SCAILWanModel")
SCAIL_2 = replace(WAN, family="SCAIL-2", model_class="comfy.ldm.wan.model.SCAIL2WanModel")
VACE = replace(
    WAN,
    family="Wan VACE",
    model_class="comfy.ldm.wan.model.VaceWanModel",
    modules={
        "blocks.*": BLOCK,
        "vace_blocks.*": ModulePlan(
            inputs={
                "c": tokens(VIDEO),
                # The hidden states in front of the first block, the same for all of these.
                "x": side(VIDEO, dim=1, dims=3),
                "kwargs.freqs": FREQS,
                "kwargs.e": Repeated(streams=VIDEO, ndim=4),
            },
            attention=VIDEO,
            local=("cross_attn",),
        ),
        "head": HEAD,
    },
)
# For autoregressive sampling. Without such a sampler's state it is an ordinary Wan; with it, it is refused.
CAUSAL_WAN = replace(WAN, family="Causal Wan", model_class="comfy.ldm.wan.ar_model.CausalWanModel")
